"""python -m tests.gpu: every part runs or is skipped with a reason, whatever the others do, within ten minutes."""

import ctypes
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.gpu import carry, cupti
from tests.gpu.calls import STEPS, counts_per_step
from tests.gpu.parts import PARTS, ROOT, Machine, Part, look_at_machine, run_all, summary


def program(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


def test_what_must_be_known_takes_five_minutes_at_most_and_comes_first() -> None:
    must = [part for part in PARTS if part.is_must]
    assert sum(part.limit_s for part in must) <= 300 and list(PARTS[:len(must)]) == must
    assert sum(part.limit_s for part in PARTS) <= 860


def test_a_part_that_fails_hangs_or_does_not_start_keeps_no_other_from_running(
        capsys: pytest.CaptureFixture[str]) -> None:
    # TensorFlow leaves memory to the other rank and to cupy.
    passes = "import os; assert (os.environ['TF_FORCE_GPU_ALLOW_GROWTH'], os.environ['NCCL_MAX_CTAS']) == ('true', '8')"
    parts = [Part("fails", program("raise SystemExit(3)"), 60),
             Part("hangs", program("import time; time.sleep(99)"), 1),
             Part("is not there", ("/no/such/program",), 60), Part("passes", program(passes), 60)]
    outcomes = run_all(parts, Machine())
    assert [outcome.text for outcome in outcomes] == [
        "FAILED with code 3", "FAILED: not done in 1 s",
        "FAILED to start: [Errno 2] No such file or directory: '/no/such/program'", "passed"]
    assert [outcome.has_failed for outcome in outcomes] == [True, True, True, False]
    assert len(summary(outcomes).splitlines()) == 4
    ends = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("== ended: ")]
    assert ends == ["fails", "hangs", "is", "passes"]


def test_a_part_is_skipped_for_the_first_thing_that_it_lacks() -> None:
    part = Part("p", program("raise SystemExit(3)"), 60, ("gpu", "mpi"))
    outcome, = run_all([part], Machine(mpi="mpi4py is not installed", sanitizer="none"))
    assert outcome.text == "skipped: mpi4py is not installed" and not outcome.has_failed
    assert part.why_skipped(Machine(gpu="no GPU", mpi="none")) == "no GPU"
    assert part.why_skipped(Machine(sanitizer="none")) == ""


def test_without_a_gpu_every_part_says_why_it_is_skipped(tmp_path: Path) -> None:
    reason = look_at_machine().gpu
    if not reason:
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "-m", "tests.gpu", "--into", tmp_path / "found"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr  # Nothing has run.
    assert (tmp_path / "found").read_text() == done.stdout
    lines = done.stdout.split("== summary\n")[1].splitlines()
    assert [line.split("  ")[0] for line in lines] == [part.name for part in PARTS]
    assert all(f"skipped: {reason}" in line for line in lines)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["kernel", "one_rank", "calls", "price", "overlap", "compiled", "killed",
                                  "tensorflow_checks"])
def test_the_programs_of_the_parts_run_on_the_stand_in(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"tests.gpu.{name}", "--stand-in"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Cupti:
    """In place of libcupti.so: CUDA is called three times while calls are counted, and once afterwards."""

    def __init__(self, status: int = 0) -> None:
        self._status, self._callback = status, None

    def cuptiSubscribe(self, subscriber: object, callback: Callable, data: None) -> int:  # noqa: N802
        self._callback = callback
        return self._status

    def cuptiEnableDomain(self, enable: int, subscriber: object, domain: int) -> int:  # noqa: N802
        for name in (b"cuLaunchKernel", b"cuStreamSynchronize", b"cuMemAllocAsync"):
            for site in (0, 1):  # the beginning of the call, and its end
                self.called(name, site)
        return 0

    def cuptiUnsubscribe(self, subscriber: object) -> int:  # noqa: N802
        self._callback = None
        return 0

    def called(self, name: bytes, site: int) -> None:
        if self._callback is not None:
            self._callback(None, 1, 0, ctypes.pointer(cupti._Data(site=site, name=name)))


def test_cupti_counts_the_calls_of_the_steps() -> None:
    library = Cupti()
    with cupti.Calls(library) as calls:
        for _ in range(STEPS):
            library.called(b"cuEventSynchronize", 0)
    library.called(b"cuMemFree_v2", 0)
    assert counts_per_step(calls.number) == {"waits": 1 + 1 / STEPS, "allocations": 1 / STEPS, "frees": 0}
    with pytest.raises(ValueError, match="CUPTI has counted no calls of CUDA"):
        counts_per_step({})
    with pytest.raises(OSError, match="CUPTI has failed with status 15"), cupti.Calls(Cupti(15)):
        pass


def test_without_cupti_its_parts_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    assert cupti.find_cupti() == ""


def test_a_part_that_there_is_not_is_named() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu", "two ranks", "three ranks"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "no such part: three ranks; there are: controls, overlap, " in done.stderr


def code(kind: int, architecture: int, contents: bytes) -> bytes:
    """An entry of a container of code for GPUs, with a header of 64 bytes."""
    return struct.pack("<HHIQ", kind, 0, 64, len(contents)).ljust(28, b"\0") + struct.pack("<I", architecture).ljust(
        36, b"h") + contents


def test_the_code_for_other_gpus_becomes_zeros_and_nothing_else_changes(tmp_path: Path) -> None:
    entries = [code(2, 80, b"eighty.."), code(2, 90, b"ninety.."), code(1, 90, b"ptx....."), code(2, 100, b"hundred.")]
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)
    names = b"\0.nv_fatbin\0.text\0"
    header = b"\x7fELF".ljust(0x28, b"\0")
    start = 64
    sections = [(1, 1, start, len(container)), (12, 1, start, 8), (0, 3, start + len(container), len(names))]
    table = start + len(container) + len(names)
    raw = (header + struct.pack("<Q", table)).ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 2) + container + names
    raw += b"".join(struct.pack("<IIQQQQ", name, kind, 0, 0, at, nbytes).ljust(64, b"\0")
                    for name, kind, at, nbytes in sections)
    library = tmp_path / "library.so"
    library.write_bytes(raw)
    assert carry.trim(library, 90) == {(2, 80): 8, (2, 90): 8, (1, 90): 8, (2, 100): 8}
    zeros = bytes(8)
    expected = raw.replace(b"eighty..", zeros).replace(b"ptx.....", zeros).replace(b"hundred.", zeros)
    assert library.read_bytes() == expected and b"ninety.." in expected


def test_what_is_carried_in_pieces_is_there_after_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, here = tmp_path / "carried", tmp_path / "here"
    content = np.random.default_rng(1).bytes(10_000)
    (tmp_path / "file").write_bytes(content)
    archives = [tmp_path / f"{name}.tar.xz" for name in ("first", "tensorflow")]
    for path in archives:
        with tarfile.open(path, "w:xz") as archive:
            archive.add(tmp_path / "file", f"{path.name[:-7]}/file")
    numbers = carry.cut(archives, folder, 8192)
    assert list(numbers) == [1, 2, 3, 4, 5, 6] and not archives[0].exists()
    ran: list[Any] = []
    monkeypatch.setattr(carry.subprocess, "run", lambda command, **_: ran.append(command[3:]) or SimpleNamespace(
        returncode=0))
    for number in numbers:
        assert carry.run(folder, number, here) == 0
        assert (here / "site/first/file").exists() == (number >= 2)
        assert (here / "site/tensorflow/file").exists() == (number >= 4)
    assert ran == [["--into", str(here / "found"), *names] for names in carry.CALLS]
    assert (here / "site/tensorflow/file").read_bytes() == content
    assert not list(here.glob("*-of-*"))


def test_a_wheel_is_unpacked_with_its_programs_and_libraries(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a-1.data/", "")
        for name, mode in (("a/__init__.py", 0o644), ("a-1.data/data/bin/mpirun", 0o755),
                           ("a-1.data/data/lib/b.so", 0o644), ("a-1.data/scripts/run", 0o755),
                           ("a-1.data/purelib/c.py", 0o644)):
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            archive.writestr(member, name)
    site = tmp_path / "site"
    carry.install(tmp_path / "a.whl", site)
    files = {str(path.relative_to(site)): path.stat().st_mode & 0o777 for path in site.rglob("*") if path.is_file()}
    assert files == {"a/__init__.py": 0o644, "bin/mpirun": 0o755, "lib/b.so": 0o644, "bin/run": 0o755, "c.py": 0o644}


def test_every_part_is_in_one_of_the_calls_which_have_room_in_ten_minutes() -> None:
    parts = {part.name: part for part in PARTS}
    assert sorted(chain(*carry.CALLS)) == sorted(parts)
    assert set(chain(*carry.CALLS[:2])) == {part.name for part in PARTS if part.is_must}
    assert max(sum(parts[name].limit_s for name in names) for names in carry.CALLS) <= 400
