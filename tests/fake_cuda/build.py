"""Build the fake device for this interpreter's torch, once per version of its sources and of torch.

The libraries go to ``$XDG_CACHE_HOME/crossover_ddp/fake_cuda``. Several processes may call `build`
at the same time: the first one builds, the others wait for it.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

SOURCES: Final = Path(__file__).parent / "device"
TORCH: Final = Path(torch.__file__).parent
_COMPILER: Final = ("g++", "-std=c++20", "-fPIC", "-shared", "-pthread", "-Wno-interference-size")


class BuildError(RuntimeError):
    """The sources do not compile."""


def why_not() -> str | None:
    """Return the reason why this machine cannot build the device, or None.

    Sources that do not compile are an error of `build`, not a reason.
    """
    if torch.version.cuda is None:
        return "this torch was built without CUDA; the fake device runs torch's CUDA build"
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            return f"no {tool} here; the fake device is compiled with g++ and binutils"
    toolkit = _find()
    return toolkit if isinstance(toolkit, str) else None


@functools.cache
def _find() -> dict[str, Path] | str:
    """Return the files of NVIDIA's packages that torch's CUDA build depends on, by name.

    If any is missing, return a text that names it instead.
    """
    packages = TORCH.parent
    wanted = {
        "runtime": "nvidia/**/lib/libcudart.so.13",
        "nccl": "nvidia/**/lib/libnccl.so.2",
        "nvrtc": "nvidia/**/lib/libnvrtc.so.*",
        "headers": "nvidia/**/include/cuda_runtime_api.h",
        "nccl_headers": "nvidia/**/include/nccl.h",
        # Only triton's package has the host headers.
        "crt": "triton/backends/nvidia/include/crt/host_defines.h",
    }
    found = {
        name: path
        for name, pattern in wanted.items()
        if (path := next(packages.glob(pattern), None))
    }
    missing = [pattern for name, pattern in wanted.items() if name not in found]
    if missing:
        return f"no {' and no '.join(missing)} in {packages}; the fake device is built with them"
    return found


def _key(toolkit: dict[str, Path]) -> str:
    """Return a name for the libraries that depends on everything they are built from."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {_COMPILER}".encode())
    for source in sorted(path for path in [*SOURCES.rglob("*"), Path(__file__)] if path.is_file()):
        digest.update(source.name.encode() + source.read_bytes())
    for library in (toolkit["runtime"], toolkit["nccl"]):
        digest.update(f"{library.name} {library.stat().st_size}".encode())
    return digest.hexdigest()[:16]


def build() -> Path:
    """Return the directory of the libraries. Build them first if they do not exist."""
    reason = why_not()
    toolkit = _find()
    assert reason is None and isinstance(toolkit, dict), reason
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "crossover_ddp"
        / "fake_cuda"
    )
    cache.mkdir(parents=True, exist_ok=True)
    libraries = cache / _key(toolkit)
    if libraries.exists():
        return libraries
    with (cache / f"{libraries.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not libraries.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _build_all(toolkit, Path(work))
                made = Path(work) / "libraries"
                made.rename(libraries)
    return libraries


def _build_all(toolkit: dict[str, Path], work: Path) -> None:
    """Compile all parts at the same time, then link the three libraries."""
    out = work / "libraries"
    runtime = toolkit["runtime"].name
    nvrtc = toolkit["nvrtc"].name
    out.mkdir()
    (work / "include").mkdir()
    (work / "include" / "crt").symlink_to(toolkit["crt"].parent)
    headers = _options(
        "-I", work / "include", toolkit["headers"].parent, toolkit["nccl_headers"].parent
    )
    of_torch = _options("-I", TORCH / "include", TORCH / "include/torch/csrc/api/include")
    libraries = [
        f"-L{TORCH / 'lib'}",
        "-lc10",
        "-lc10_cuda",
        "-ltorch_cpu",
        "-ltorch_cuda",
        "-ltorch",
    ]
    parts = [work / f"{name}.o" for name in ("runtime", "streams", "driver")]
    _run_all(
        *[
            _compile("-c", "-O1", *headers, SOURCES / f"{part.stem}.cpp", "-o", part)
            for part in parts
        ],
        _compile(
            "-c",
            "-O2",
            f"-I{SOURCES / 'stub'}",
            *headers,
            SOURCES / "nccl.cpp",
            "-o",
            work / "nccl.o",
        ),
        _compile("-c", SOURCES / "nvrtc.cpp", "-o", work / "nvrtc.o"),
        _compile(
            "-O1",
            *headers,
            *of_torch,
            SOURCES / "kernels.cpp",
            *libraries,
            "-o",
            out / "kernels.so",
        ),
    )
    _write_rest(toolkit["runtime"], parts, "cuda", 801)  # cudaErrorNotSupported
    _write_rest(toolkit["nvrtc"], [work / "nvrtc.o"], "nvrtc", 11)  # NVRTC_ERROR_INTERNAL_ERROR
    _write_rest(toolkit["nccl"], [work / "nccl.o"], "nccl", 5)  # ncclInvalidUsage
    _run_all(
        _link(out / runtime, *parts, work / "runtime.rest.cpp", "-ldl"),
        _link(out / toolkit["nccl"].name, work / "nccl.o", work / "nccl.rest.cpp"),
        _link(out / nvrtc, work / "nvrtc.o", work / "nvrtc.rest.cpp"),
    )
    (out / "libcuda.so.1").symlink_to(runtime)


def _compile(*words: str | Path) -> list[str]:
    return [*_COMPILER, *map(str, words)]


def _link(library: Path, *words: str | Path) -> list[str]:
    """Link a library under the real one's name, which is also the version of its symbols."""
    versions = library.parent.with_name(f"{library.name}.map")
    versions.write_text(f"{library.name} {{ global: *; }};")
    return _compile(
        *words, f"-Wl,-soname,{library.name},--version-script={versions}", "-o", library
    )


def _options(letter: str, *paths: Path) -> list[str]:
    return [f"{letter}{path}" for path in paths]


def _write_rest(real: Path, mine: Sequence[Path], prefix: str, error: int) -> None:
    """Write a source file with the functions that our library lacks. Each returns ``error``.

    Except in NVRTC, which does not use the runtime, they name themselves for the error's text.
    """
    defined = set[str]().union(*map(_names, mine))
    lacking = sorted(
        name for name in _names(real, "-D") - defined if name.startswith((prefix, f"__{prefix}"))
    )
    lines = [
        '#define API extern "C" __attribute__((visibility("default")))',
        "API int fake_not_covered(const char*);",
    ]
    for name in lacking:
        report = "" if prefix == "nvrtc" else f'fake_not_covered("{name}"); '
        lines.append(f"API int {name}() {{ {report}return {error}; }}")
    mine[0].with_suffix(".rest.cpp").write_text("\n".join(lines))


def _names(library: Path, *options: str) -> set[str]:
    shown = subprocess.check_output(["nm", "--defined-only", *options, str(library)], text=True)
    return {line.split()[-1].split("@")[0] for line in shown.splitlines() if line}


def _run_all(*commands: Sequence[str]) -> None:
    """Run commands at the same time. Raise `BuildError` with the output of those that fail."""
    running = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    failures = [
        f"{' '.join(words)}\n{output}"
        for process, words, output in zip(running, commands, outputs, strict=True)
        if process.returncode
    ]
    if failures:
        raise BuildError("\n".join(failures))
