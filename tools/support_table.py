"""Write the support tables of docs/support.md and README.md from what the backends declare.

    python tools/support_table.py            write both files
    python tools/support_table.py --check    exit 1 if either is out of date

A cell is the answer of `Backend.unsupported` to a problem with that one feature: nothing here is typed by hand.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tilewise.dispatch import NAMES, backend
from tilewise.problem import AttentionProblem, TensorSig

ROOT = Path(__file__).parents[1]
SIG = TensorSig("bfloat16", 4, (), True, False)
PLAIN = AttentionProblem("forward", "bfloat16", 128, 128, False, SIG, SIG, SIG)
BEGIN, END = "<!-- support table: make docs -->", "<!-- end of support table -->"

#: Group, feature, and the problem's fields that ask for it.
FEATURES: list[tuple[str, str, dict[str, object]]] = [
    ("dtypes", "fp16", {"dtype": "float16"}),
    ("dtypes", "bf16", {}),
    ("dtypes", "fp32", {"dtype": "float32"}),
    ("dtypes", "fp64", {"dtype": "float64"}),
    ("head dims", "(64, 64)", {"head_dim": 64, "head_dim_v": 64}),
    ("head dims", "(96, 96)", {"head_dim": 96, "head_dim_v": 96}),
    ("head dims", "(128, 128)", {}),
    ("head dims", "(192, 128)", {"head_dim": 192}),
    ("head dims", "(256, 256)", {"head_dim": 256, "head_dim_v": 256}),
    ("head dims", "other multiples of 8, D ≠ Dv", {"head_dim": 72, "head_dim_v": 40}),
    ("layouts", "packed q and k (cu_seqlens)", {"packed_q": True, "packed_k": True}),
    ("layouts", "packed q, dense k", {"packed_q": True}),
    ("layouts", "dense q, packed k", {"packed_k": True}),
    ("layouts", "seqused_q, seqused_k", {"seqused_q": True, "seqused_k": True}),
    ("layouts", "paged K/V", {"paged": True, "seqused_k": True}),
    ("layouts", "grouped heads (GQA, MQA)", {"grouped": True}),
    ("masks", "causal", {"right": True}),
    ("masks", "windows", {"left": True, "right": True}),
    ("masks", "mask_mod", {"mask_mod": "0" * 64}),
    ("masks", "block sparsity", {"mask_mod": "0" * 64, "block_size": (128, 128)}),
    ("scores", "softcap", {"softcap": True}),
    ("scores", "learnable sink", {"sink": "bfloat16"}),
    ("scores", "score_mod", {"score_mod": "0" * 64}),
    ("execution", "num_splits other than 1", {"split": True}),
    ("execution", "deterministic", {"deterministic": True}),
    ("execution", "gradient of lse", {"lse_gradient": True}),
]
FORWARD_HAS_NONE = {"deterministic", "gradient of lse"}  # they ask something of the backward alone
BACKWARD_HAS_NONE = {"num_splits other than 1"}


def cell(name: str, feature: str, asked: dict[str, object], direction: str) -> str:
    """Return "yes", "–" or "" for one feature of one backend."""
    if feature in (FORWARD_HAS_NONE if direction == "forward" else BACKWARD_HAS_NONE):
        return ""
    problem = replace(PLAIN, direction=direction, **asked)  # type: ignore[arg-type]
    return "–" if backend(name).unsupported(problem) else "yes"


def page() -> str:
    """Return docs/support.md."""
    lines = ["# Support", "", "Written by `make docs` from the backends' own declarations.", ""]
    lines += ["| backend | runs on |", "|---|---|"]
    lines += [f"| `{name}` | {backend(name).runs_on} |" for name in NAMES]
    columns = [(name, direction) for name in NAMES for direction in ("forward", "backward")]
    lines += ["", "| | " + " | ".join(f"`{name}` {direction}" for name, direction in columns) + " |"]
    lines += ["|---|" + "---|" * len(columns)]
    group = ""
    for of, feature, asked in FEATURES:
        if of != group:
            group = of
            lines.append(f"| **{group}** |" + " |" * len(columns))
        cells = (cell(name, feature, asked, direction) for name, direction in columns)
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    lines += ["", "What a backend refuses, in its own words:", ""]
    for name, direction in columns:
        plain = backend(name).unsupported(replace(PLAIN, direction=direction))
        found = list(plain)
        for _, _, asked in FEATURES:
            problem = replace(PLAIN, direction=direction, **asked)  # type: ignore[arg-type]
            found += [reason for reason in backend(name).unsupported(problem) if reason not in found]
        lines += [f"- `{name}` {direction}: {'; '.join(found) or 'nothing'}."]
    return "\n".join(lines) + "\n"


def summary() -> str:
    """Return the README's table: what each backend lacks."""
    lines = [BEGIN, "| backend | runs on | forward lacks | backward lacks |", "|---|---|---|---|"]
    for name in NAMES:
        words = [f"`{name}`", backend(name).runs_on]
        for direction in ("forward", "backward"):
            missing = [f for _, f, asked in FEATURES if cell(name, f, asked, direction) == "–"]
            asked_of = [f for _, f, asked in FEATURES if cell(name, f, asked, direction)]
            words.append("not built" if missing == asked_of else ", ".join(missing) or "nothing")
        lines.append("| " + " | ".join(words) + " |")
    return "\n".join([*lines, END])


def files() -> dict[Path, str]:
    """Return the text that each file should have."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return {ROOT / "docs" / "support.md": page(), readme: before + summary() + after}


def main() -> int:
    """Write or check both files."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = arguments.parse_args().check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date, run make docs' if check else 'written'}")
        if not check:
            path.write_text(files()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
