"""A project directory becomes an image: every part of a recipe is found in a box of it, and a second build does nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from folder_boxes import FolderBackend, FolderBox, why_not

from rollmill.sandbox.images.build import build
from rollmill.sandbox.images.hostcopy import copy_host
from rollmill.sandbox.images.store import Image, ImageStore
from rollmill.sandbox.images.tree import Tree
from rollmill.sandbox.records import SandboxSpec

DEADLINE_S = 100.0
SMALL = "sh bash ls cat cp mv rm mkdir ln chmod chown touch id find tar setpriv hostname git grep stat sleep".split()
needs_boxes = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    """With a base of a few programs, so that the tests do not copy a whole host."""
    store = ImageStore(tmp_path_factory.mktemp("images"))
    with store.stage() as stage:
        (stage / "rootfs").mkdir()
        with Tree(stage / "rootfs") as tree:
            copy_host(tree, SMALL, common=())
        store.name("small", store.commit(stage, Image(env={"PATH": "/usr/bin:/bin", "FROM_BASE": "1"})))
    return store


def play(scene: Callable[[], Awaitable[object]]) -> object:
    async def whole() -> object:
        async with asyncio.timeout(DEADLINE_S):
            return await scene()

    return asyncio.run(whole())


def made(store: ImageStore, project: Path, backend: FolderBackend | None = None, **more: object) -> tuple[Image, list[str]]:
    said: list[str] = []
    image = play(lambda: build(project, store=store, backend=backend or FolderBackend(store), on_progress=said.append, **more))  # type: ignore[arg-type]
    assert isinstance(image, Image)
    return image, said


def asked(store: ImageStore, image: Image, *commands: str) -> list[str]:
    async def scene() -> list[str]:
        box = await FolderBackend(store).create(SandboxSpec(image=image.digest))
        try:
            return [(await box.exec(command, timeout_s=20)).stdout.decode().strip() for command in commands]
        finally:
            await box.close()

    found = play(scene)
    assert isinstance(found, list)
    return found


def write(project: Path, recipe: str, **files: str) -> Path:
    project.mkdir(exist_ok=True)
    (project / "sandbox.toml").write_text(recipe)
    for path, text in files.items():
        target = project / path.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return project


RECIPE = """
base = "small"
user = "mira"
hostname = "atlas"
[env]
GREETING = "hello"
[[run]]
command = "echo $GREETING $FROM_BASE > /etc/greeting && rm /etc/skel/.profile && chmod 700 /srv && ln -s /etc/greeting /opt/link"
[[run]]
command = "id -un > mine && mkdir -p deep/er && echo x > deep/er/f"
user = "mira"
"""


@needs_boxes
def test_every_part_of_a_recipe_is_found_in_a_box(store: ImageStore, tmp_path: Path) -> None:
    project = write(tmp_path / "p", RECIPE, files__etc__motd="welcome\n", files__home__mira__notes="buy milk\n")
    image, _ = made(store, project, name="parts")
    found = asked(
        store, image, "id", "pwd", "cat /etc/greeting /etc/motd",
        "cat mine notes; stat -c %U mine notes deep/er/f .bashrc /etc/motd /etc/greeting",
        "ls -a /etc/skel", "stat -c %a /srv /tmp /root", "ls /opt -l", "cat /etc/hostname /etc/hosts", "stat -c %h .bashrc notes deep/er/f",
    )  # fmt: skip
    assert found[0] == "uid=1000(mira) gid=1000(mira) groups=1000(mira)" and found[1] == "/home/mira"
    assert found[2] == "hello 1\nwelcome"
    assert found[3].split() == ["mira", "buy", "milk", "mira", "mira", "mira", "mira", "root", "root"]
    assert ".bashrc" in found[4] and ".profile" not in found[4]
    assert found[5].split() == ["700", "1777", "700"] and "link -> /etc/greeting" in found[6] and found[7].count("atlas") == 2
    assert found[8].split() == ["1", "1", "1"]
    assert (image.user, image.uid, image.env["GREETING"], image.hostname) == ("mira", 1000, "hello", "atlas")
    assert store.verify("parts").digest == image.digest


@needs_boxes
def test_second_build_makes_no_box_and_a_change_only_what_follows_it(store: ImageStore, tmp_path: Path) -> None:
    recipe = 'base = "small"\n[[run]]\ncommand = "echo 1 > /one"\n[[run]]\ncommand = "echo 2 > /two"\n'
    project, backend = write(tmp_path / "p", recipe), FolderBackend(store)
    first, _ = made(store, project, backend)
    assert backend.num_made == 2
    again, said = made(store, project, backend)
    assert backend.num_made == 2 and again == first and all(line.endswith(": kept") for line in said)
    made(store, write(project, recipe.replace("echo 2", "echo 3")), backend)
    assert backend.num_made == 3
    made(store, project, backend, fresh=True)
    assert backend.num_made == 5


@needs_boxes
def test_equal_projects_give_equal_digests(store: ImageStore, tmp_path: Path) -> None:
    recipe = 'base = "small"\n[[run]]\ncommand = "echo 1 > /one; touch /empty"\n'
    one, _ = made(store, write(tmp_path / "a", recipe), fresh=True)
    two, _ = made(store, write(tmp_path / "b", recipe), fresh=True)
    assert one.digest == two.digest and (one.name, two.name) == ("a", "b")


@needs_boxes
def test_failing_step_is_told_with_its_output_and_leaves_no_image(store: ImageStore, tmp_path: Path) -> None:
    project = write(tmp_path / "broken", 'base = "small"\n[[run]]\ncommand = "echo no luck; exit 3"\n')
    with pytest.raises(ValueError, match=r"(?s)exit 3` ended with status 3:\nno luck"):
        made(store, project)
    with pytest.raises(ValueError, match="image broken is not in the store"):
        store.get("broken")
    assert list(store.root.glob(".new-*")) == []


@needs_boxes
def test_step_that_keeps_size_and_time_of_a_file_is_still_seen(store: ImageStore, tmp_path: Path) -> None:
    sneaky = "cp -p /etc/shells /tmp/s; echo x > /tmp/x; cat /etc/shells | { read a; cat; } > /tmp/rest"
    command = f"{sneaky}; printf '#bin/sh\\n' > /etc/shells; cat /tmp/rest >> /etc/shells; touch -r /tmp/s /etc/shells"
    image, _ = made(store, write(tmp_path / "sneaky", f'base = "small"\n[[run]]\ncommand = """{command}"""\n'.replace("\\n", "\\\\n")))
    assert asked(store, image, "cat /etc/shells")[0].startswith("#bin/sh\n/usr/bin/sh")


SERVICE = """
base = "small"
[[services]]
name = "clock"
argv = ["/bin/sh", "-c", "SCRIPT"]
ready_argv = ["/bin/cat", "/tmp/ready"]
ready_s = 5.0
"""


@needs_boxes
def test_services_are_proven_and_kept_in_the_image(store: ImageStore, tmp_path: Path) -> None:
    image, _ = made(store, write(tmp_path / "up", SERVICE.replace("SCRIPT", "echo 1 > /tmp/ready; exec sleep 60")))
    assert [service.name for service in image.services] == ["clock"]
    with pytest.raises(ValueError, match="service 'clock' does not come up"):
        made(store, write(tmp_path / "down", SERVICE.replace("SCRIPT", "echo no database; exit 1")))


@needs_boxes
def test_image_on_top_of_another_keeps_its_services_but_does_not_run_them_while_building(store: ImageStore, tmp_path: Path) -> None:
    made(store, write(tmp_path / "lower", SERVICE.replace("SCRIPT", "echo 1 > /tmp/ready; exec sleep 60")))
    backend = Watched(store)
    image, _ = made(store, write(tmp_path / "upper", 'base = "lower"\n[[run]]\ncommand = "echo 1 > /one"\n'), backend)
    assert [service.name for service in image.services] == ["clock"] and backend.services == [(), ()]


class Watched(FolderBackend):
    def __init__(self, store: ImageStore) -> None:
        super().__init__(store)
        self.services: list[tuple[object, ...]] = []

    async def create(self, spec: SandboxSpec) -> FolderBox:
        self.services.append(self._store.get(spec.image).services)
        return await super().create(spec)


@needs_boxes
def test_changed_environment_runs_the_steps_again(store: ImageStore, tmp_path: Path) -> None:
    recipe = 'base = "small"\n[env]\nWORD = "one"\n[[run]]\ncommand = "echo $WORD > /word"\n'
    made(store, write(tmp_path / "p", recipe), name="word")
    image, _ = made(store, write(tmp_path / "p", recipe.replace("one", "two")), name="word")
    assert asked(store, image, "cat /word; echo $WORD") == ["two\ntwo"]


def git(folder: Path, *words: str) -> str:
    env = os.environ | {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(
        ["git", "-C", str(folder), *words], env=env, check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()


@needs_boxes
def test_repository_is_at_its_commit_and_knows_nothing_newer(store: ImageStore, tmp_path: Path) -> None:
    origin = tmp_path / "shop.git"
    origin.mkdir()
    git(origin, "init", "-q")
    (origin / "f").write_text("old\n")
    git(origin, "add", "f")
    git(origin, "commit", "-qm", "broken")
    commit = git(origin, "rev-parse", "HEAD")
    (origin / "f").write_text("the answer\n")
    git(origin, "commit", "-qam", "the fix")
    fix = git(origin, "rev-parse", "HEAD")
    project = write(tmp_path / "p", f'base = "small"\n[repository]\nsource = "../shop.git"\ncommit = "{commit}"\n')
    image, _ = made(store, project, name="repo")
    found = asked(
        store, image, "pwd; cat f; stat -c %U f .git/HEAD", "git status --short; git log --oneline --all | cat; git branch",
        "git remote; git reflog",
        f"git cat-file -t {fix} || echo unknown", "grep -r shop.git .git; git config --list --local",
    )  # fmt: skip
    assert found[0].split() == ["/home/dev/shop", "old", "dev", "dev"] and found[1].split("\n") == [f"{commit[:7]} broken", "* main"]
    assert found[2] == "" and found[3].endswith("unknown") and "remote" not in found[4] and "shop" not in found[4]


@needs_boxes
def test_missing_commit_is_told(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    git(tmp_path / "r", "init", "-q")
    with pytest.raises(ValueError, match="failed"):
        made(store, write(tmp_path / "p", f'base = "small"\n[repository]\nsource = "../r"\ncommit = "{"0" * 39}1"\n'))


@needs_boxes
def test_apt_packages_on_a_base_without_their_database_are_refused(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a Debian base"):
        made(store, write(tmp_path / "p", 'base = "small"\n[packages]\napt = ["hello"]\n'))
