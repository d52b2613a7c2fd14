"""Draw a trace: drafted and accepted tokens per iteration, and SL, KLD and WVIR over time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .request import StepTrace

_DRAFTED, _ACCEPTED, _OTHERS, _KLD, _WVIR = "#bdd7e7", "#08519c", "#c8c8c8", "#b35806", "#54278f"


def plot_trace(
    traces: Mapping[int, Sequence[StepTrace]], output: str | os.PathLike[str], request: int | None = None
) -> None:
    """Draw one request of a trace, its batch in the background, into an image file.

    Parameters
    ----------
    traces : mapping of int to sequence of StepTrace
        Request id to its steps, as `dsde.trace.read_trace` returns them.
    output : path
        The image; its suffix decides the format.
    request : int, optional
        The request to draw; None takes the one with the most steps.

    Raises
    ------
    ValueError
        The trace has no such request, or the suffix is of no image format.
    """
    if request is None:
        request = max(traces, key=lambda r: len(traces[r]))
    if request not in traces:
        raise ValueError(f"the trace has no request {request}; it has {_ranges(sorted(traces))}")
    steps = traces[request]
    x = range(len(steps))
    drafted, accepted = [s.sl for s in steps], [s.accepted for s in steps]

    figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    bars, sl, kld, wvir = figure.subplots(4, 1, sharex=True, height_ratios=[3, 2, 1.5, 1.5])
    bars.bar(x, drafted, width=0.8, color=_DRAFTED, label="drafted")
    bars.bar(x, accepted, width=0.8, color=_ACCEPTED, label="accepted")
    bars.set_ylabel("tokens")
    bars.legend(loc="upper right", ncols=2, frameon=False, bbox_to_anchor=(1, 1.13))
    share = f" ({sum(accepted) / sum(drafted):.0%})" if sum(drafted) else ""
    bars.set_title(
        f"Request {request}: {sum(accepted)} of {sum(drafted)} drafted tokens accepted{share} in {len(steps)} steps",
        loc="left",
        fontsize=11,
    )

    for other, others_steps in traces.items():
        if other != request:
            sl.plot([s.sl for s in others_steps], color=_OTHERS, linewidth=0.8, drawstyle="steps-mid")
    if len(traces) > 1:
        sl.plot([], [], color=_OTHERS, linewidth=0.8, label=f"the {len(traces) - 1} others of the batch")
    sl.plot(x, drafted, color=_ACCEPTED, linewidth=1.8, drawstyle="steps-mid", label=f"request {request}")
    sl.set_ylabel("SL")
    sl.legend(loc="upper right", ncols=2, frameon=False, fontsize=9)
    sl.set_ylim(0, 1.35 * max(s.sl for t in traces.values() for s in t) + 1)

    for axes, name, color in ((kld, "kld", _KLD), (wvir, "wvir", _WVIR)):
        values = [getattr(s, name) for s in steps]
        axes.plot(
            x, [math.nan if v is None else v for v in values], color=color, linewidth=1.3, marker=".", markersize=4
        )
        axes.set_ylim(bottom=0)
    kld.set_ylabel("mean KLD, nats")
    wvir.set_ylabel("WVIR")
    wvir.axhline(1, color="black", linewidth=0.8, linestyle=":")
    wvir.set_xlabel("verification step")

    for axes in (bars, sl, kld, wvir):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    for axes in (bars, sl, wvir):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (bars, sl):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    figure.align_ylabels()
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


def _ranges(ids: Sequence[int]) -> str:
    return f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else f"only {ids[0]}"
