"""The built wheel, in an environment that has its base dependencies and nothing else.

The environment is a real one: a new venv whose site-packages holds links to the distributions that the wheel's own
metadata asks for, and to what those ask for in turn. Nothing is downloaded. What only an extra brings (numba,
transformers, ...) cannot be imported there, so a module that needs one at import fails here.
"""

import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
ABSENT = ("numba", "tensorboard", "transformers", "sklearn", "pytest")

OF_AN_EXTRA = {
    f"mercer.backends.{name}": ("llvmlite", "numba")
    for name in (
        "calls",
        "channel_scan_kernels",
        "decode_kernels",
        "decode_vectors",
        "matrix_block_layout",
        "matrix_block_pairs",
        "matrix_block_parts",
        "matrix_block_vectors",
        "matrix_scan_backward",
        "matrix_scan_kernels",
        "matrix_scan_parts",
        "matrix_scan_vectors",
        "microkernels",
        "packed_blocks",
        "packed_kernels",
        "packed_vectors",
        "polynomial_backward",
        "polynomial_blocks",
        "polynomial_kernels",
        "polynomial_parts",
        "program_kernels",
        "program_vectors",
        "rwkv7_step_kernels",
        "selective_scan_kernels",
        "selective_scan_vectors",
        "short_convolution_kernels",
        "softmax_backward",
        "softmax_kernels",
        "softmax_parts",
        "softmax_vectors",
        "sparse_backward",
        "sparse_kernels",
        "sparse_parts",
        "step_kernels",
        "tile_backward",
        "tile_parts",
        "tile_softmax",
        "tile_vectors",
        "wkv_kernels",
    )
} | {
    f"mercer.integrations.{name}": ("transformers",)
    for name in (
        "transformers",
        "hf.attention",
        "hf.masks",
        "hf.recognise",
        "hf.registry",
        "hf.states",
        "hf.swap",
    )
}
"""Modules that are made of what an extra brings, and which of it; nothing imports them before it is found to be
there.
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
import mercer
assert mercer.__file__.startswith(sys.prefix), mercer.__file__
names = ["mercer", *(module.name for module in pkgutil.walk_packages(mercer.__path__, "mercer."))]
failed = {}
extras = {OF_AN_EXTRA}
for name in names:
    try:
        importlib.import_module(name)
        if name in extras:
            failed[name] = "imports without its extra, so it is no longer an exception"
    except ModuleNotFoundError as error:
        if error.name not in extras.get(name, ()):
            failed[name] = repr(error)
    except BaseException as error:
        failed[name] = repr(error)
print(*names, sep="\\n")
sys.exit("\\n".join(f"{name}: {error}" for name, error in failed.items()) or 0)
""".replace("{OF_AN_EXTRA}", repr(OF_AN_EXTRA))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def base_distributions(requirements: list[str]) -> dict[str, Distribution]:
    """The installed distributions that the requirements reach without any extra of mercer's."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found[name] = distribution(name)
        needs = [Requirement(text) for text in found[name].requires or []]
        waiting += [(need, wanted) for need in needs for wanted in ("", *requirement.extras)]
    return found


def link(found: Distribution, site: Path) -> None:
    """Link the top of everything that a distribution installed into site-packages."""
    assert found.files is not None, found.metadata["Name"]
    tops = {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        target = Path(str(found.locate_file(top)))
        if target.exists() and not (site / top).exists():
            (site / top).symlink_to(target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv with the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.EnvBuilder(symlinks=True).create(folder)
    interpreter = folder / "bin" / "python"
    site = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    installed = run(
        sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", "--quiet", wheel
    )
    assert installed.returncode == 0, installed.stderr
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    for found in base_distributions(
        [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist: " in line]
    ).values():
        link(found, site)
    return interpreter


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("mercer/")}
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in (source / "mercer").rglob("*") if path.is_file()}
    assert packed == {name for name in files if "__pycache__" not in name}
    assert "mercer/py.typed" in packed


@pytest.mark.parametrize("name", ABSENT)
def test_the_environment_lacks_what_extras_bring(python: Path, name: str) -> None:
    """Otherwise the next test would prove nothing."""
    result = run(python, "-I", "-c", f"import {name}")
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr


def test_every_module_imports_with_base_dependencies_alone(python: Path) -> None:
    result = run(python, "-I", "-W", "error", "-c", IMPORT_ALL)
    assert result.returncode == 0, result.stderr
    source = ROOT / "src"
    expected = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in (source / "mercer").rglob("*.py")
    }
    assert set(result.stdout.split()) == expected


def test_the_installed_command_runs(python: Path) -> None:
    result = run(python.with_name("mercer"), "version", "--json")
    assert result.returncode == 0, result.stderr
    assert '"mercer"' in result.stdout
