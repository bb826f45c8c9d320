"""A word on tensors that are compressed otherwise than when a state was saved."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, Mapping

from ._client import Client, invalid


class WatchCompression:
    """Warns on rank 0 once of each tensor whose compression is not what the saved plan has. A tensor
    that is declared later is looked at then."""

    def __init__(self, client: Client, saved: Any, plan: Callable[[], Mapping[str, Any]]) -> None:
        """saved: the plan of a state. plan: gives the present one."""
        try:
            self._saved = _compression_of(saved)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise invalid(f"the state is damaged: 'plan' is no plan ({error!r})") from None
        self._client = client
        self._plan = plan

    def begin(self) -> None:
        """Replaces the watch of an earlier state."""
        client = self._client
        client.after_declare[:] = [hook for hook in client.after_declare
                                   if not isinstance(hook, WatchCompression)]
        if client.rank() == 0:
            client.after_declare.append(self)
            self()

    def __call__(self) -> None:
        changed = {}
        for name, now in _compression_of(self._plan()).items():
            before = self._saved.pop(name, now)
            if before != now:
                changed[name] = (before, now)
        if not changed:
            return
        name, (before, now) = next(iter(changed.items()))
        more = f" (one of {len(changed)} such tensors)" if len(changed) > 1 else ""
        warnings.warn(f"tensor '{name}' is compressed otherwise than when the state was saved: it was "
                      f"{before}, it is {now}{more}. Residuals are taken over where there is feedback",
                      UserWarning, stacklevel=3)


def _compression_of(plan: Any) -> Dict[str, str]:
    """Of each tensor that is averaged or summed, how it is compressed, in words."""
    result: Dict[str, str] = {}
    for unit in plan["units"]:
        if unit["op"] == "broadcast":
            continue
        phases = []
        for phase in unit["phases"]:
            up, down = (phase[link] + (f" with {phase[link + '_feedback']}"
                                       if phase[link + "_feedback"] != "none" else "")
                        for link in ("uplink", "downlink"))
            since = f" from step {phase['first_step']} on" if phase["first_step"] > 0 else ""
            phases.append(f"{up} up and {down} down{since}")
        for member in unit["members"]:
            result.setdefault(member["tensor"], ", then ".join(phases))
    return result
