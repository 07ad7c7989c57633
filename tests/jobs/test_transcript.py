"""The scenes of docs/transcript.md: each ends as the page shows it, on one screen, and leaves nothing behind."""

import re

import pytest

from ..support.jobs import ROOT, needs_mpirun
from ..support.transcript import COLUMNS, LINES, PAGE, SCENES, SCRIPTS, Scene, record, screen, script_block, squeezed

pytestmark = needs_mpirun

each_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.title)


def on_the_page(scene: Scene) -> tuple[str, ...]:
    """The lines of the page that follow the command of a scene, until its exit code."""
    part = PAGE.read_text().split(f"\n## {scene.title}\n")[1]
    found = re.search(rf"^```text\n\$ {re.escape(scene.command)}\n(.*?)^\$ echo \$\?\n{scene.code}\n```$", part,
                      re.DOTALL | re.MULTILINE)
    assert found is not None
    return tuple(found[1].splitlines())


def summary(lines: tuple[str, ...]) -> str:
    """What `mpistrat run` says last, without ids of processes: ranks, the user's code, the message, the exit code.

    The file with the last operations is left out: whether a rank had any when another one failed is a matter of time.
    """
    text = re.sub(r"\bprocesses [\d, ]+", "processes", "\n".join(lines))
    said = squeezed(text[text.find("mpistrat run: "):]) if "mpistrat run: " in text else ""
    return re.sub(r"mpistratrun:thelastoperationsofranks.*?\.json", "", said)


@pytest.mark.nightly
@each_scene
def test_a_scene_ends_on_one_screen_as_on_the_page(scene: Scene) -> None:
    recording = record(scene)
    text = "\n".join(recording.lines)
    assert recording.code == scene.code, text
    assert recording.left == (), text
    assert len(recording.lines) < LINES, text  # and the line of the command
    for decisive in scene.decisive:
        assert squeezed(decisive) in squeezed(*recording.lines), text
    assert summary(recording.lines) == summary(on_the_page(scene)), text


@each_scene
def test_the_page_has_the_scene_and_its_script(scene: Scene) -> None:
    lines = on_the_page(scene)
    assert len(lines) < LINES
    assert max(map(len, lines)) <= COLUMNS
    for decisive in scene.decisive:
        assert squeezed(decisive) in squeezed(*lines)
    if scene.script:
        assert script_block(scene) in PAGE.read_text()


def test_no_frame_of_a_framework_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert 'File "/home/me/no_file.py"' in page
    assert ".pyx" not in page
    assert "site-packages" not in page


def test_the_quick_start_is_the_first_script_of_the_readme() -> None:
    assert script_block(SCENES[1]) == f"```python\n{(SCRIPTS / 'quick_start.py').read_text()}```"
    assert script_block(SCENES[1]) in (ROOT / "README.md").read_text()


def test_the_install_command_is_that_of_the_readme() -> None:
    extras = re.search(r"pip install '(\.\[[a-z,]+\])'", PAGE.read_text())
    assert extras is not None
    assert f"pip install '{extras[1]}' && .venv/bin/mpistrat run" in (ROOT / "README.md").read_text()


def test_a_screen_resolves_progress_bars_and_colours_and_wraps() -> None:
    assert screen("1/9 \x1b[32m--\x1b[0m\r9/9 \x1b[1mdone\x1b[0m\x1b[K\r\nab\bc\r\n") == ("9/9 done", "ac")
    lines = screen("a" * (COLUMNS + 1) + "\r\nb\r\n")
    assert lines == ("a" * COLUMNS, "a", "b")
