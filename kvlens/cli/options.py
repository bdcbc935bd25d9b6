"""The options that verbs share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str,
    typer.Option("-m", "--model", metavar="MODEL", help="smollm2-135m, a Hugging Face id, a folder or a .gguf file."),
]
Traces = Annotated[str, typer.Argument(metavar="TRACES", help="A .jsonl, .parquet or .txt file, or hf:NAME.")]
Chat = Annotated[bool, typer.Option("--chat", help="Render the prompt with the model's chat template.")]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The run folder to write.")]
Labels = Annotated[str, typer.Argument(metavar="LABELS", help="The folder of a label run.")]
Signals = Annotated[str, typer.Argument(metavar="SIGNALS", help="The folder of a signals run of the same traces.")]
AuditOnly = Annotated[bool, typer.Option("--audit-only", help="Of labels made with a screen, use the audit windows.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where the model runs.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="The model's number format (auto: float32 on the CPU)."),
]
Attention = Annotated[
    Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"],
    typer.Option("--attention", help="The attention backend (auto: sdpa)."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="The seed of every random choice.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Read only the first N traces.")]
BeyondContext = Annotated[
    bool, typer.Option("--beyond-context", help="Allow traces longer than the model was trained for.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace what the folder holds of another configuration.")]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Answer with paths only, and no progress.")]
Workers = Annotated[str, typer.Option("--workers", help="Processes to use: a number, or ray[:ADDRESS].")]
BudgetTokens = Annotated[
    int | None, typer.Option("--budget-tokens", min=1, metavar="N", help="Tokens that each KV head may hold.")
]
BudgetBytes = Annotated[
    int | None,
    typer.Option("--budget-bytes", min=1, metavar="N", help="Bytes of keys and values that a text may take."),
]
KeepFraction = Annotated[
    float | None, typer.Option("--keep-fraction", metavar="F", help="The share of the prompt's tokens that stays.")
]
