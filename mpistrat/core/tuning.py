"""Every tuning constant of mpistrat, with what it decides and the measurement behind it.

A constant belongs here if its value changes only how fast a job runs, or how much memory and processor time it takes.
Time limits after which something counts as failed, sizes that a protocol or a library fixes, and settings
(core.settings) are beside the code that uses them.

The first line on a constant says what it decides. The second line says what was measured, or "not measured" and the
reason for the value. Unless a comment names a machine, figures are from the two machines of two cores in docs/speed.md.
Shared by all packages; nothing here is changed at run time.
"""

# -- core: what is kept from one step to the next ---------------------------------------------------------------------

# How many Request objects of each type are kept, to be found again by their arguments and in tables by identity, and
# how many fusion plans. The same requests, and lists of requests, come back at every step.
# Not measured: no training step that was run has as many requests. Making a plan takes longer than a small reduction.
KEPT_REQUESTS = 4096
KEPT_FUSION_PLANS = 1024

# Bytes of free blocks that a ResultPool always keeps.
# Not measured. An earlier limit, on the number of sizes, kept 1.2 GB of 10 MB results of changing sizes.
SPARE_RESULT_BYTES = 32 * 2**20

# In how many steps the sizes of result blocks double. Results of nearly equal sizes share blocks.
# Not measured: a block is at most an eighth larger than its result.
RESULT_SIZE_STEPS = 8

# How many result blocks a ResultPool looks at for a free one before it makes another one.
# With 20,000 results kept, an operation spent 4 to 9 ms on looks at all blocks, and spends 0.04 to 0.15 ms with 32.
RESULT_LOOKS = 32

# Rounds of the engine after which a result block that was not taken is freed.
# Not measured: fresh memory costs 0.25 ms of page faults per MB, so blocks must outlive several steps.
IDLE_RESULT_ROUNDS = 64

# -- negotiation ------------------------------------------------------------------------------------------------------

# How many children a rank has in the tree of negotiation.
# Not measured (no cluster was at hand): 16,384 ranks make 4 levels, and no rank receives more than 16 messages a step.
FAN_OUT = 16

# Seconds without an outcome after which a rank asks rank 0 to end the vote, so that the ranks negotiate in full.
# Not measured: under ENGINE_IDLE_POLL_S, so that an idle engine asks at its second look.
VOTE_TIMEOUT_S = 0.04

# Seconds between two cycles of a rank that has nothing to check, if nothing else happens.
# Not measured: messages and submissions wake the rank in any case.
LONGEST_CYCLE_S = 60.0

# How often a rank that waits for others looks whether a warning is due within the time of a warning, and the shortest
# and the longest time in seconds between two looks.
# Not measured: a warning comes a quarter of its time late at most, or a second.
STALL_WARNING_LOOKS = 4
STALL_SHORTEST_POLL_S = 0.05
STALL_LONGEST_POLL_S = 1.0

# How often rank 0 looks within the limit on stalls whether it has passed, and the longest time in seconds in between.
# Not measured: a look at all pending names takes long, and the end may come half a second late.
STALL_ABORT_LOOKS = 10
STALL_ABORT_LONGEST_POLL_S = 0.5

# Seconds between two looks at whether an unanswered vote is to be reported.
# Not measured: reports are due after a minute or more.
VOTE_REPORT_POLL_S = 1.0

# How many chances rank 0 lets pass at most before it calls the next vote, after votes that ended in the first round.
# Not measured: such votes become rare, and a job that turns regular still finds the fast path again.
MOST_SKIPPED_VOTES = 64

# -- engine -----------------------------------------------------------------------------------------------------------

# Seconds for which a waiting engine stays awake before it sleeps.
# A sleep and a wake-up take a third of this time. An all-reduce of 64 KB on 2 ranks takes 20 to 40 us less than with 0.
ENGINE_SPIN_S = 300e-6

# Seconds between two looks of an idle engine at its messages.
# Not measured: 20 looks a second; a rank that waits takes 0.04 % of a core in one host.
ENGINE_IDLE_POLL_S = 0.05

# Seconds after which a rank sends the next message of the trace, if nothing else happens.
# Not measured: 3 MB/s, more than the operations of any training step that was run.
OBSERVER_POLL_S = 0.001

# How many operations of each process set a rank keeps for the trace.
# Not measured: 1.2 MB when full. A step of 20 buckets leaves the last 200 steps.
RECORDED_OPERATIONS = 4096

# How many of its last operations a rank reports to `mpistrat run` when a rank fails (most, least), and all ranks do.
# A line of 3800 bytes has about 100 operations. Not measured with many ranks: mpirun forwards 700 KB of all ranks.
REPORTED_OPERATIONS = 256
REPORTED_OPERATIONS_LEAST = 32
REPORTED_OPERATIONS_OF_ALL = 16384

# Seconds for which an execution of a graph that ends in an error waits until what it has submitted is complete, before
# the engines end. Not measured: the other ranks come to the same collective, if a little later.
FAILED_EXECUTION_S = 2.0

# -- api --------------------------------------------------------------------------------------------------------------

# Seconds between two looks of a rank at whether its launcher is alive.
# A look takes 30 us.
LAUNCHER_POLL_S = 1.0

# -- transport: connections among the ranks of one host ---------------------------------------------------------------

# Bytes of a part of a message over a socket, and how many descriptors one message passes to another rank in init().
# Not measured: well below the kernel's default limit for a datagram, and the 253 descriptors that the kernel allows.
SOCKET_FRAGMENT_BYTES = 32 * 1024
DESCRIPTORS_PER_MESSAGE = 128

# -- transport.shm: ranks of one host ---------------------------------------------------------------------------------

# Bytes of a chunk of a two-shot all-reduce, at first and for small ones.
# 102 MB on 2 ranks: 45 ms; with 128 KiB 67. On 64 ranks, where Python takes longer per chunk, 90 ms; with 256 KiB 135.
SHM_CHUNK_BYTES = 512 * 1024

# Other sizes, which a job tries on its own all-reduces (transport.shm.two_shot), in rising order.
# 2 ranks, 512 KiB / 2 MiB / 4 MiB, ms. Cores that share a cache: 4 MB 1.06 / 0.88 / 0.88, 16 MB 5.0 / 6.0 / 6.8, 102 MB
# 33 / 37 / 39; that share none: 4 MB 1.62 / 1.36 / 1.56, 16 MB 6.9 / 6.3 / 6.0, 102 MB 41 / 39 / 36. 8 MiB as 4 MiB.
SHM_LARGER_CHUNKS = (2 * 2**20, 4 * 2**20)

# Bytes of an all-reduce from which a job tries these sizes.
# 2 ranks, 1 MB: 0.31 ms with 512 KiB and 0.28 with 2 MiB; 2 MB: 0.47 and 0.37. Smaller all-reduces have 1 or 2 chunks.
SHM_CHOICE_BYTES = 2**20

# Bytes of memory for the chunks of one host, and the part of the host's memory, beyond which no larger size is tried.
# Not measured: 4 MiB for up to 15 ranks, 2 MiB for up to 31.
SHM_MOST_CHUNK_MEMORY = 256 * 2**20
SHM_MOST_CHUNK_MEMORY_PART = 64

# How often each size is tried before a choice. The choice changes if the time with another size is at most CHUNK_GAIN
# of the time with the chosen size.
# Not measured: six all-reduces for three sizes, some of them half as fast. The least of two times of 102 MB repeats
# within 5 % on a quiet machine.
CHUNK_TRIES = 2
CHUNK_GAIN = 0.95

# After how many all-reduces the sizes are tried again, at least and at most. If the speed changes, after the number
# divided by CHUNK_EARLIER.
# Not measured: a trial costs as much as two all-reduces, 1.5 % of 128. Cores of a virtual machine move within minutes.
CHUNK_KEPT_LEAST = 128
CHUNK_KEPT_MOST = 1024
CHUNK_EARLIER = 4

# The speed has changed if the median time per byte of the last CHUNK_SPEED_TIMES all-reduces differs by this factor
# from that of the first all-reduces after the choice.
# The time of 102 MB on 2 ranks changes by 1.5 when the cores of a virtual machine move apart.
CHUNK_SPEED_FACTOR = 1.25
CHUNK_SPEED_TIMES = 8

# How many chunks of a two-shot all-reduce may be under way.
# Not measured: one is packed, one reduced, one unpacked, and a rank may be one chunk ahead of the others.
SHM_CHUNKS_UNDER_WAY = 4

# Bytes of all ranks together up to which every rank reduces everything (one-shot) instead of its slice.
# Two ranks whose cores share a cache: no difference up to 512 KiB, and 1 MB takes 111 us, but 161 with 4 MiB here.
SHM_ONE_SHOT_BYTES = 512 * 1024

# How many chunks of a large reduce-scatter may be under way. The memory of the all-reduces is divided among them.
# Beside busy processes, 2 ranks, 64 MB: 9 ms with 2 chunks of 1 MiB, and 11 with 4 of 512 KiB; 4 ranks, 16 MB: 14
# instead of 19. 4 chunks of 1 MiB, which take twice the memory, are as fast as 2.
SHM_SCATTERS_UNDER_WAY = 2

# Average bytes of a tensor from which tensors are reduced one by one; smaller ones are packed, reduced and unpacked.
# 50 tensors of 256 KB on 2 ranks, three runs in turn: 6 to 19 % longer with 1 MiB, no clear difference with 8 or 128.
SHM_LARGE_TENSOR_BYTES = 32 * 1024

# How many numpy views the kept layouts of all-reduces may hold.
# Some ten MB, enough for a few GB of large tensors. Kept layouts halve Python's time per chunk, which is 21 us without.
SHM_KEPT_VIEWS = 2**15

# How many looks a rank takes at a counter before it yields the processor, seconds for which it yields the processor,
# and seconds of each sleep afterwards.
# 102 MB on 2 ranks: 72 ms with 0.1 ms, 39 with 1 ms, 39 with 3 ms. A late rank copies its chunk within that time. The
# looks (as MPI_SPIN_TESTS) and the sleep were not measured: Linux makes a sleep 150 us at least.
SHM_SPIN_LOOKS = 50
SHM_YIELD_S = 1e-3
SHM_SLEEP_S = 100e-6

# Bytes of the ring from one rank to one other (longer messages pass in parts), and how many looks a rank takes at its
# rings between two system calls, which let other threads and processes run.
# Not measured: messages of a repeated step have 8 + 8 bytes per bucket, those of the first step 60 per tensor. A system
# call takes as long as several looks.
SHM_RING_BYTES = 8 * 1024
SHM_RING_LOOKS = 16

# -- 8-bit numbers between hosts -------------------------------------------------------------------------------------

# Bytes of a bucket from which on it is sent as 8-bit numbers. Smaller buckets are sent as they are, with the vote.
# Not measured: the vote saves a round trip, about 0.2 ms, in which 2.5 KB cross 100 Mbit/s, and 25 KB 1 Gbit/s.
QUANTISED_LEAST_BYTES = 16 * 1024

# How many blocks of 256 values are rounded, or read, at once.
# 4 million floats, int8, ns for each, to round with feedback and to read: 2.0 and 0.6 with 256, 3.6 and 0.9 with 128,
# 3.3 and 0.8 with 64, 3.1 and 0.8 with 512; a memcpy of the floats takes 0.35.
QUANTISED_BATCH_BLOCKS = 256

# -- transport.mpi ----------------------------------------------------------------------------------------------------

# Bytes of all ranks together up to which an all-reduce is one MPI_Allgather, instead of a scatter and a gather. Between
# hosts, bytes of a slice from all hosts (not measured).
# 2 ranks, two runs in turn: 1 to 16 KB take 96 to 119 us, and 113 to 133 without. No gain at 128 KB with 256 KiB.
MPI_ALLGATHER_BYTES = 32 * 1024

# Bytes of a piece of an all-reduce, which stays in the cache while it is received, combined and sent.
# 102 MB on 2 ranks: 26 ms with 1 MiB on an idle machine, and 32 in one piece. A busy machine pays more for each wait
# between pieces, hence the larger value.
MPI_CHUNK_BYTES = 4 * 1024 * 1024

# Bytes of a piece of an allgather or a broadcast, from all ranks together.
# Not measured: the limit of a wait holds for one piece, so that a slow network is not taken for one that is down.
MPI_PIECE_BYTES = 64 * 1024 * 1024

# How many tests of a request a rank makes, 0.5 us each, before it yields the processor.
# 1 KB on 2 ranks beside two busy processes: 2.4 us, and 32 without these tests.
MPI_SPIN_TESTS = 50

# Seconds for which a rank yields the processor instead of sleeping, and bytes per second that a transfer adds to them.
# Not measured: what a small exchange takes; on networks slower than that a sleep costs nothing.
MPI_YIELD_S = 2e-3
MPI_YIELD_BYTES_PER_S = 1e9

# Afterwards, a sleep is the wait so far divided by MPI_SLEEP_DIVISOR, within these two limits in seconds.
# Not measured: sleeps in proportion to the wait make no wait much longer than it must be.
MPI_SLEEP_DIVISOR = 64
MPI_SHORTEST_SLEEP_S = 50e-6
MPI_LONGEST_SLEEP_S = 1e-3

# Seconds for which a rank polls MPI for messages without a pause: in the background, and while a caller waits.
# With the second, small tensors between hosts take half the time, and 16 MB two thirds. The first: not measured.
MPI_POLL_SPIN_S = 50e-6
MPI_POLL_CALLER_SPIN_S = 1e-3

# Afterwards, a pause is the time without a message divided by MPI_POLL_SLEEP_DIVISOR, but at least MPI_SHORTEST_SLEEP_S
# and at most MPI_POLL_LONGEST_SLEEP_S. A rank that waits for a rank of another host takes 2.3 % of a core.
MPI_POLL_SLEEP_DIVISOR = 8
MPI_POLL_LONGEST_SLEEP_S = 3e-3

# Seconds of the first pause of the sleeping barrier in init() and shutdown(), doubled up to the second value.
# Not measured: ranks import for seconds, and an early rank must not take a core from a late rank.
BARRIER_FIRST_SLEEP_S = 10e-6
BARRIER_LONGEST_SLEEP_S = 5e-3

# -- transport.hierarchical: hosts of ranks ---------------------------------------------------------------------------

# Bytes of a chunk between hosts, and how many chunks may be under way.
# 16 MB on 2 hosts of 2 ranks, two exchanges per chunk: 51 ms with 512 KiB, 43 with 1 MiB, 38 with 2, 35 with 4. Larger
# chunks leave the wire idle for longer while they are packed. The number was not measured: a chunk goes through five
# stages, and a rank may be one chunk ahead of the others.
HIERARCHICAL_CHUNK_BYTES = 2 * 1024 * 1024
HIERARCHICAL_CHUNKS_UNDER_WAY = 6

# Least bytes of a slice that one rank of a host reduces and sends.
# 2 hosts of 2 ranks on two cores, 4 to 256 KB: no difference among 4, 16 and 64 KiB.
HIERARCHICAL_SLICE_BYTES = 16 * 1024

# How many hosts exchange votes directly, and small all-reduces with them. More hosts agree first.
# 3 and 4 hosts: see PIGGYBACK_CROSS_BYTES. More were not measured. Each host sends to every other host.
PIGGYBACK_MOST_HOSTS = 8

# Bytes of all ranks of a host together up to which its first rank reduces and exchanges everything with the vote.
# 2 hosts of 2 ranks (network namespaces), six runs in turn: 16 KB 0.33 ms instead of 0.50, 64 KB 0.40 instead of 0.55,
# 256 KB 0.53 instead of 0.79, 512 KB 0.83 instead of 1.2. More ranks per host were not measured.
PIGGYBACK_HOST_BYTES = 2 * 1024 * 1024

# The same for more than two hosts: bytes of one all-reduce, of all hosts together.
# Each host sends everything to every other host. 3 hosts of 2 ranks on two cores, five runs in turn: 64 bytes to 8 KB
# take 0.53 ms instead of 0.76; 4 hosts, three runs: up to 4 KB 0.88 instead of 1.12.
PIGGYBACK_CROSS_BYTES = 32 * 1024

# Bytes of a message between hosts, of which larger data consist.
# Below the eager limit of MPI, 64 KiB over TCP in Open MPI with the header: MPI sends such a message without asking the
# receiver. transport.mpi.requests says what that saves. 30 KB over 1 Gbit/s takes as long.
EAGER_MESSAGE_BYTES = 60 * 1024

# -- gpu --------------------------------------------------------------------------------------------------------------

# Seconds between two looks of the engine at a GPU whose work it waits for.
# On the first machine with a GPU (H200), a sleep of 20 us took 77 us, and a look 15 to 20 us.
GPU_LOOK_S = 20e-6

# Bytes of alignment padding in a fusion buffer, and of the smallest fusion buffer to ask for where GPU memory is short.
# Below it tensors are staged.
# Not measured: 16 bytes for each of 4,096 tensors; smaller buckets would be all latency.
GPU_FUSION_PADDING_BYTES = 64 * 1024
GPU_LEAST_FUSION_BYTES = 2**20

# Elements that one block of threads of the copy kernel copies, and how many threads a block has.
# Not measured on a GPU: 64 elements per thread.
COPY_BLOCK_ELEMENTS = 16384
COPY_BLOCK_THREADS = 256

# Seconds between two exchanges on whether all ranks are connected to NCCL, doubled from the first to the second value.
# Not measured: connecting takes about a second, once.
NCCL_CONNECT_FIRST_SLEEP_S = 1e-3
NCCL_CONNECT_LONGEST_SLEEP_S = 0.1

# How often the watchdog looks within the limit of a call, the longest pause in seconds, and the seconds for which it
# waits for a call that it has ended, before it frees the communicator that the call uses.
# Not measured: an abort comes at most a tenth of the limit late. NCCL's waiting loops look at the flag without a pause.
WATCHDOG_LOOKS = 10
WATCHDOG_LONGEST_SLEEP_S = 5.0
WATCHDOG_REVOKE_S = 10.0

# -- tensorflow -------------------------------------------------------------------------------------------------------

# Bytes of a tensor up to which a graph concatenates it with others, instead of handing it over on its own.
# Handing over one more tensor costs 10 us, and joining and splitting 64 KiB in the graph about as much.
JOINED_TENSOR_BYTES = 64 * 1024

# Bytes of a bucket of gradients, which is reduced while backprop makes the next one.
# Dense layers with 64 MB of gradients, 2 ranks, a core for each, six runs in turn: averaging adds 28 ms to a step of
# 142 ms with 16 MiB, and 12 with 64 MiB, since with no core to spare nothing overlaps; three runs with 1 MiB: 22. A
# host with spare cores was not measured.
BUCKET_BYTES = 16 * 1024 * 1024

# The same with several hosts, and bytes of the first bucket there, which lets the wire begin early.
# Two hosts of one rank, 1 Gbit/s, ten layers of 4 MB: a step takes 487 ms, of which the last bucket 34; 661 to 719 with
# 16 MiB. The engine reduces together what is ready, so the wire has no more to do. The first bucket: not measured.
HOSTS_BUCKET_BYTES = 4 * 1024 * 1024
HOSTS_FIRST_BUCKET_BYTES = 1024 * 1024

# The same on GPUs. Each bucket there costs some calls of Python beside the training step, whatever its size.
# Not measured on a GPU. On the tests' stand-in for a GPU these calls take 0.27 ms of a core. ResNet-50 has 4 buckets
# in place of 8, and BERT-base 13 in place of 26.
GPU_BUCKET_BYTES = 32 * 1024 * 1024

# Bytes of a bucket up to which its submit callback waits for the result, and the longest wait in seconds.
# Dense layers with 1 MB of gradients, 2 ranks, two runs in turn: averaging adds 0.5 and 1.0 ms to a step of 1.5 ms, and
# 1.5 and 1.7 with 64 KiB. 2 ms often were not enough between hosts, and waiting elsewhere takes changes of threads.
SUBMIT_WAIT_BYTES = 1024 * 1024
SUBMIT_WAIT_S = 10e-3

# How many completion queues are made at a time, and to how many queues one operation can write, in the order to try.
# 400 single all-reduces of a tf.function: 100 ms with one operation per queue, 60 to 80 of them in these operations.
# The first was not measured: a graph with many collectives that wait makes its queues in fewer steps.
COMPLETION_QUEUES_MADE = 16
COMPLETION_QUEUES_WRITTEN = (64, 8)

# -- cli --------------------------------------------------------------------------------------------------------------

# Seconds between two looks of `mpistrat run` at mpirun and at what the job has left, and of mpistrat.run() at whether
# the ranks have started.
# Not measured: signals end the first wait early; starting takes seconds.
SUPERVISOR_POLL_S = 0.1
RUN_START_POLL_S = 0.05

# Bytes that `mpistrat run` reads of mpirun's stderr at a time.
# Not measured: what a pipe holds by default.
STDERR_READ_BYTES = 2**16
