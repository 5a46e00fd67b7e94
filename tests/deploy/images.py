"""Images of deploy/Containerfile, and containers of them, by buildah and podman, with a storage of their own."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conftest import ROOT
from tests.deploy import PACKAGES, TOOLS
from tests.deploy.pages import command

DEPENDENCIES = "/dependencies"
"""Where the base image has torch and the rest: what is installed here, bound into it, so that nothing is fetched."""
WITH_TORCH = f"{DEPENDENCIES}/with-torch"
"""Folder of torch: an empty folder bound over it makes a base image without torch."""
INDEX = "/index"
BASE, IMAGE = "localhost/debian-with-torch", "localhost/elastic-train:test"
IMAGE_FROM_INDEX = "localhost/elastic-train:from-index"
CONTAINERS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""
"""What podman can do without systemd, and without the right to raise limits, which tests may lack."""


def why_no_images() -> str | None:
    """Return why no image can be built here, or None."""
    if os.geteuid() != 0:
        return "images are built from Debian's packages, which takes root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}: apt-get install --no-install-recommends {PACKAGES}"
    if sys.version_info[:2] != debian_python():
        return "this Python is not Debian's version of it, in whose image what is installed here would run"
    return None


@functools.cache
def debian_python() -> tuple[int, int]:
    """Return the version of the Python that this Debian has."""
    said = subprocess.run(["apt-cache", "depends", "python3"], capture_output=True, text=True, check=False).stdout
    found = [line.split("python3.")[1].split()[0] for line in said.splitlines() if "Depends: python3." in line]
    return (3, int(found[0])) if found and found[0].isdigit() else (0, 0)


class Images:
    """Builds and runs images in a folder; what it starts ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "overlay"]
        self._storage = storage
        (folder / "containers.conf").write_text(CONTAINERS)
        self._environ = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        self.dependencies = folder / "dependencies"

    def podman(self, *arguments: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        """Run podman; return how it ended, with what it said."""
        return self._run(["podman", *self._storage, *arguments], may_fail=may_fail)

    def buildah(self, *arguments: str) -> str:
        """Run buildah, and return what it said."""
        return self._run(["buildah", *self._storage, *arguments]).stdout

    def _run(self, command: Sequence[str], *, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert may_fail or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done

    def make_base(self) -> None:
        """Make a base of Debian's packages that has a torch, as those for CUDA have one: what is installed here."""
        shutil.copytree(sysconfig.get_path("purelib"), self.dependencies, copy_function=_link, ignore=_is_ours)
        (self.dependencies / "with-torch").mkdir()
        for path in [self.dependencies / "torch", *self.dependencies.glob("torch-*.dist-info")]:
            path.rename(self.dependencies / "with-torch" / path.name)
        found = "/usr/lib/python3/dist-packages/dependencies.pth"
        release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
        # what a build and torch need, unpacked alone: to configure packages takes minutes on a busy machine
        needed = "python3,dash,bash,coreutils,grep,sed,base-files,libstdc++6,libgomp1"
        packages = ["--variant=extract", f"--include={needed}", release["VERSION_CODENAME"]]
        first = f"import sys; sys.path[:0] = ['{DEPENDENCIES}', '{WITH_TORCH}']"
        hook = f'--extract-hook=echo "{first}" > $1{found}; mkdir $1{DEPENDENCIES}'
        self._run(["mmdebstrap", "--quiet", hook, *packages, str(self.folder / "base.tar")])
        self.podman("import", str(self.folder / "base.tar"), BASE)

    def build(self, wheel: Path) -> None:
        """Build the image of a wheel as users do, without a network."""
        self._build(wheel, IMAGE, "no-index = true\n")  # which would be tried for minutes

    def build_from_index(self, wheel: Path, index: Path) -> None:
        """Build it on a base without a torch, which is found in a package index: a folder, so without a network."""
        (self.folder / "nothing").mkdir()
        volumes = [f"{self.folder / 'nothing'}:{WITH_TORCH}:ro", f"{index}:{INDEX}:ro"]
        options = [option for volume in volumes for option in ("--volume", volume)]
        pip = "disable-pip-version-check = true\nretries = 0\n"
        self._build(wheel, IMAGE_FROM_INDEX, pip, *options, "--build-arg", f"TORCH_INDEX=file://{INDEX}")

    def _build(self, wheel: Path, tag: str, pip: str, *options: str) -> None:
        context = self.folder / "context"
        context.mkdir(exist_ok=True)
        shutil.copy(wheel, context)
        shutil.copy(ROOT / "constraints.txt", context)
        (self.folder / "pip.conf").write_text(f"[global]\n{pip}")
        how = ["--isolation", "chroot", "--network", "host", "--volume", self.volume]
        how += ["--volume", f"{self.folder}/pip.conf:/etc/pip.conf:ro", *options]
        filled = {"deploy/Containerfile": str(ROOT / "deploy" / "Containerfile"), "build/image": str(context)}
        _, (program, build, *what) = command("containers.md", "buildah build", {**filled, "elastic-train:0.1.0": tag})
        alone = ["unshare", "--net"]  # chroot has the network of its caller
        self._run([*alone, program, *self._storage, build, *how, "--build-arg", f"BASE={BASE}", *what])

    @property
    def volume(self) -> str:
        return f"{self.dependencies}:{DEPENDENCIES}:ro"

    @contextlib.contextmanager
    def mounted(self, image: str = IMAGE) -> Iterator[Path]:
        """Yield the folder of an image's files."""
        name = self.buildah("from", "--pull-never", image).strip()
        try:
            yield Path(self.buildah("mount", name).strip())
        finally:
            self.buildah("rm", name)

    def run(self, *arguments: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command of the image with no more rights than a pod has: no root, and nothing to write but /runs."""
        return self.podman("run", "--rm", *self.rights, *options, IMAGE, *arguments, may_fail=True)

    @property
    def rights(self) -> list[str]:
        """Return the rights of the page's command, without its folder, which pods of deploy/kubernetes also have."""
        _, (_, _, *page) = command("containers.md", "podman run")
        rights = ["--user", "1000:1000", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
        return [*page[: page.index("--volume")], *rights, "--env", "OMP_NUM_THREADS=1", "--volume", self.volume]

    def close(self) -> None:
        """End all containers, and delete what was made."""
        self.podman("rm", "--all", "--force", "--time", "0", may_fail=True)
        self.podman("rmi", "--all", "--force", may_fail=True)
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder, ignore_errors=True)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
    return target


def _is_ours(folder: str, names: list[str]) -> list[str]:
    """Leave out this project's own installation, and what belongs to this machine's Python alone."""
    return [
        name for name in names if name.startswith(("elastic_train", "_editable_impl", "__editable__", "_virtualenv"))
    ]
