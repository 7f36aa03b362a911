"""`python -m tilewise doctor`: what is here, what runs, what is wrong and how to mend it. Plain text: no library."""

from __future__ import annotations

import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version

import torch

from ..errors import SettingError
from ..settings import TOPICS, VARIABLES, Settings


def report() -> int:
    """Print the report; return 1 if something is wrong, else 0."""
    wrong: list[str] = []
    for title, section in (
        ("versions", _versions),
        ("GPUs", _gpus),
        ("settings", _settings),
        ("backends", _backends),
        ("compiler", _compiler),
        ("precompiled kernels", _precompiled),
        ("kernel cache", _cache),
    ):
        print(title)
        try:
            lines = section(wrong)
        except SettingError:  # `_settings` has said which and why
            lines = ["unknown: the settings cannot be read"]
        for line in lines:
            print(f"  {line}")
    print("wrong" if wrong else "nothing is wrong")
    for line in wrong:
        print(f"  {line}")
    return 1 if wrong else 0


def _versions(wrong: list[str]) -> list[str]:
    lines = [f"python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    for name in ("tilewise", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "filelock", "platformdirs"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name}: not installed")
    return [*lines, f"CUDA of torch: {torch.version.cuda or 'none'}"]


def _gpus(wrong: list[str]) -> list[str]:
    if not torch.cuda.is_available():
        return ["none that torch can use"]
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append(f"cuda:{i} {p.name}, capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors")
    return found


def _settings(wrong: list[str]) -> list[str]:
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("TILEWISE_")}
    wrong += [f"{name} is no setting; expected {', '.join(VARIABLES)}" for name in given if name not in VARIABLES]
    try:
        asked = Settings.from_environment()
    except SettingError as error:
        wrong.append(f"{error}; unset or correct it")
    else:
        wrong += [f"TILEWISE_LOG: no topic {t!r}; expected {', '.join(sorted(TOPICS))}" for t in asked.log - TOPICS]
    return [f"{name}={value}" for name, value in given.items()] or ["all at their defaults"]


def _backends(wrong: list[str]) -> list[str]:
    from ..dispatch import NAMES, backend

    cuda = torch.cuda.is_available()
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count() if cuda else 0))]
    lines = []
    for name in NAMES:
        found = backend(name)
        lines.append(f"{name}: for {found.runs_on}")
        for device in devices:
            lines.append(f"  {device}: {'; '.join(found.unavailable(device)) or 'accepted'}")
    for device in devices[1:]:
        reasons = backend("sm90").unavailable(device)
        if reasons and torch.cuda.get_device_capability(device) == (9, 0):
            wrong.append(f"{device} cannot run sm90: {'; '.join(reasons)}; pip install 'tilewise[cuda]'")
    return lines


def _compiler(wrong: list[str]) -> list[str]:
    from ..compile import native
    from ..compile.launch import can_compile

    dsl, runtime, program = can_compile(), native.installed_runtime(), native.linker()
    if dsl and runtime is None:
        wrong.append(f"{native.RUNTIME} is missing from nvidia-cutlass-dsl; install nvidia-cutlass-dsl[cu13] again")
    if dsl and program is None:
        wrong.append(f"no linker: kernels cannot be cached; install one of {', '.join(native.LINKERS)}, e.g. binutils")
    return [
        f"nvidia-cutlass-dsl: {'installed' if dsl else 'not installed'}",
        f"runtime library: {runtime or 'none'}",
        f"linker: {program or 'none'}",
    ]


def _precompiled(wrong: list[str]) -> list[str]:
    from ..compile.cache import is_sealed
    from ..compile.folder import KernelFolder, locate

    name = os.environ.get("TILEWISE_KERNELS") or None
    path = locate(name)
    if path is None:
        if name is not None:
            wrong.append(
                f"TILEWISE_KERNELS={name} is neither a folder nor a package; run python -m tilewise precompile"
            )
        return ["none"]
    folder = KernelFolder(path)
    if folder.problem:
        wrong.append(f"{folder.problem}; run python -m tilewise precompile -o {path} again")
        return [f"{path}: not used"]
    names = folder.manifest.get("kernels", {})
    bad = [n for n in names if not (path / f"{n}.so").is_file() or not is_sealed((path / f"{n}.so").read_bytes())]
    if bad:
        wrong.append(f"{len(bad)} kernels of {path} are missing or corrupt; run python -m tilewise precompile again")
    return [f"{path}: {len(names)} kernels, runtime library {'there' if folder.runtime else 'not there'}"]


def _cache(wrong: list[str]) -> list[str]:
    from ..compile.cache import disk_cache

    disk = disk_cache()
    if disk is None:
        return ["off"]
    kernels = disk.kernels()
    mine = [path for _, _, path in kernels if path.parent == disk.folder]
    size = sum(n for _, n, _ in kernels)
    try:
        disk.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=disk.root) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        wrong.append(f"{disk.root} cannot be written ({error}); free space or set TILEWISE_CACHE_DIR")
    return [
        f"{disk.root}",
        f"{len(kernels)} kernels, {size / 2**20:.1f} of {disk.limit / 2**20:.0f} MiB; {len(mine)} of this version",
        f"{disk.counted('hits')} hits, {disk.counted('misses')} misses",
    ]
