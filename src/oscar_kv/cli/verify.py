"""``oscar verify``: is an artifact whole, does it fit a model, and does it do there what it did when it was made?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from . import options
from .common import FAILED, check_output, command, emit, say
from .progress import Progress
from .source import ModelSource, check_is_artifact, check_window

if TYPE_CHECKING:
    from ..artifact import Artifact

LENGTH = 1_024
KL_FACTOR, KL_MARGIN = 3.0, 0.05  # default limit: factor x what the artifact recorded + margin, nats


@command
def verify(
    artifact: options.ArtifactFolder,
    model: options.ModelOption = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", help=f"Fail above this KL, nats (default: {KL_FACTOR:g} x the recorded KL + {KL_MARGIN:g})."),
    ] = None,
    length: options.WindowLength = LENGTH,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Check an artifact, and with --model its fit and fidelity. Exit status 1: a check failed."""
    check_output(output)
    if max_kl is not None and not model:
        raise InputError("--max-kl needs --model: fidelity is measured on a model")
    if max_kl is not None and not max_kl >= 0:
        raise InputError(f"--max-kl must be 0 or more, got {max_kl}")
    check_window(length)
    check_is_artifact(artifact, option="")
    if not artifact.is_dir():
        raise InputError(f"{artifact}: no such artifact folder")
    from ..artifact import DESCRIPTION, MOMENTS, Artifact, ArtifactError

    if not (artifact / DESCRIPTION).exists():
        raise InputError(f"{artifact} is not an artifact: it has no {DESCRIPTION}")
    checks: list[dict[str, Any]] = []
    result: dict[str, Any] = {"artifact": str(artifact), "passed": False, "checks": checks, "warnings": []}
    loaded: Artifact | None = None
    try:
        loaded = Artifact.load(artifact, moments=(artifact / MOMENTS).exists(), check=False)
    except (ArtifactError, KeyError, TypeError, ValueError) as error:
        checks.append(check("files are complete", False, str(error)))
    if loaded is not None:
        checks.append(check("files are complete", True, f"method {loaded.method}, {len(loaded.layers)} layers"))
        problems = loaded.problems()
        checks.append(check("finite, inverse pairs", not problems, "; ".join(problems)))
        result["warnings"] = loaded.provenance.get("warnings", [])
        if model:
            with Progress() as progress:
                source = ModelSource(model, progress, revision, trust_remote_code, device, dtype)
                checks.extend(against_model(loaded, source, max_kl, length, result))
    result["passed"] = all(entry["passed"] for entry in checks)

    def show() -> None:
        for entry in checks:
            say(("ok   " if entry["passed"] else "FAIL ") + ": ".join(filter(None, (entry["check"], entry["detail"]))))
        for warning in result["warnings"]:
            say(f"warning: {warning}")
        say("passed" if result["passed"] else "a check failed")

    emit(result, as_json, output, show)
    if not result["passed"]:
        raise typer.Exit(FAILED)


def check(name: str, passed: bool, detail: str = "") -> dict[str, Any]:
    return {"check": name, "passed": passed, "detail": detail}


def against_model(
    artifact: Artifact, source: ModelSource, max_kl: float | None, length: int, result: dict[str, Any]
) -> list[dict[str, Any]]:
    """Fingerprint and fidelity; the measurement is skipped if anything before it failed."""
    from ..artifact import ArtifactError
    from ..calibration.split import position_limit

    try:
        config = source.config(artifact)
    except ArtifactError as error:
        return [check("fits the model", False, str(error))]
    fits = check("fits the model", True, source.short if artifact.fingerprint else f"{source.short}, by shapes alone")
    if artifact.problems():
        return [fits]
    if (limit := position_limit(config)) and limit < length:
        result["warnings"] = [
            *result["warnings"],
            f"a window of {length} tokens was asked for, {limit} are used: the model has {limit} positions",
        ]
        length = limit
    tokenizer = source.tokenizer()
    measured = measure(artifact, source.weights(), tokenizer, length, source.progress, source.short)
    result["fidelity"] = measured
    row = next(r for r in measured["results"] if r["method"] != "dense")
    return [fits, judge(row["kl_mean"], artifact.fidelity.get("kl_mean"), max_kl)]


def measure(artifact: Artifact, model: Any, tokenizer: Any, length: int, progress: Progress, name: str) -> dict[str, Any]:
    """One window of the built-in evaluation text."""
    from ..calibration.corpus import builtin_text, prefix, spread_windows, tokenize
    from ..calibration.select import metric_start
    from ..evaluate.fidelity import evaluate
    from ..geometry import model_geometry

    text = builtin_text("evaluation")
    windows = spread_windows(tokenize(tokenizer, text), length, 1, prefix(tokenizer), text.name)
    return evaluate(
        model,
        model_geometry(model.config),
        windows,
        {"dense": None, artifact.method: artifact.for_model(model)},
        artifact.config.with_(slack=0),
        text,
        name=name,
        start=metric_start(length),
        progress=progress,
    )


def judge(kl: float, recorded: float | None, max_kl: float | None) -> dict[str, Any]:
    """Whether a measured KL is good enough."""
    name = "fidelity"
    if not math.isfinite(kl):
        return check(name, False, "KL to dense is not finite: the model's activations overflow or are NaN")
    limit = max_kl if max_kl is not None else None if recorded is None else KL_FACTOR * recorded + KL_MARGIN
    if limit is None:
        return check(name, True, f"KL to dense {kl:.4f} nats; nothing recorded to compare with, --max-kl sets a limit")
    origin = "" if max_kl is not None or recorded is None else f" ({KL_FACTOR:g} x the recorded {recorded:.4f} + {KL_MARGIN:g})"
    return check(name, kl <= limit, f"KL to dense {kl:.4f} nats, limit {limit:.4f}{origin}")
