"""pytorch-fast-transformers' causal product, C++ for the CPU: `python -m benchmarks._fast_transformers` builds it.

The package as it stands does not build: its setup script asks torch for CUDA's paths where there is no CUDA. So this
command lets pip download the source distribution (telling the script, which pip runs to learn the package's name, that
CUDA is in a place that does not exist), checks its sum, unpacks it below build/peers and compiles one file there with
g++ and the package's own flags, plus -O3 -march=native and the language standard of torch's headers. Nothing of it
enters this repository. Needs pip and g++.

Source: Katharopoulos et al. 2020, arXiv 2006.16236; MIT licence.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

VERSION = "0.4.0"
SHA256 = "d1826bc31b9dfbcd018998b897667e89fc6566bd3f8c424cda9f0943544f7e90"
ROOT = Path(__file__).parent.parent / "build" / "peers"
UNPACKED = ROOT / f"pytorch-fast-transformers-{VERSION}"
PRODUCT = UNPACKED / "fast_transformers" / "causal_product"
COMPILED = PRODUCT / "causal_product_cpu.so"
NO_CUDA = 'import torch.utils.cpp_extension as extension\nextension.CUDA_HOME = "/nowhere"\n'


def build() -> Path:
    """Download, check, unpack and compile; returns the compiled file. About half a minute."""
    ROOT.mkdir(parents=True, exist_ok=True)
    archive = ROOT / f"pytorch-fast-transformers-{VERSION}.tar.gz"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text(NO_CUDA)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            command += ["--no-build-isolation", "--dest", str(ROOT), f"pytorch-fast-transformers=={VERSION}"]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": folder})
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"{archive} has the sum {found}, not {SHA256}: another file than the one this recipe was tried on"
        )
    with tarfile.open(archive) as packed:
        wanted = f"{UNPACKED.name}/fast_transformers/"  # its tests/ would hide other folders of that name
        packed.extractall(ROOT, [member for member in packed if member.name.startswith(wanted)], filter="data")

    from torch.utils.cpp_extension import include_paths, library_paths

    headers = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    flags = ["-shared", "-fPIC", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-std=c++20", "-w"]
    source = str(COMPILED.with_suffix(".cpp"))
    define = f"-DTORCH_EXTENSION_NAME={COMPILED.stem}"
    libraries = [f"-L{path}" for path in library_paths()] + ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    subprocess.run(["g++", *flags, define, *headers, source, "-o", str(COMPILED), *libraries], check=True)
    return COMPILED


def causal_product() -> Callable[..., object]:
    """The package's own autograd function, (q, k, v) -> sum_{j <= i} (q_i.k_j) v_j; raises ImportError if not built."""
    if not COMPILED.exists():
        raise ImportError("it is not built: run python -m benchmarks._fast_transformers")
    if str(UNPACKED) not in sys.path:
        sys.path.append(str(UNPACKED))
    found = importlib.import_module("fast_transformers.causal_product").causal_dot_product
    import torch

    # Loading what was compiled with -ffast-math makes this thread round subnormal numbers to 0, for everyone in it.
    torch.set_flush_denormal(False)
    return found


if __name__ == "__main__":
    print(build())
