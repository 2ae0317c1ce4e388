"""Any OpenAI-compatible server: argv template, readiness and the meaning of its metrics are written in the spec.

What a server is not said to count is unknown. Nothing is guessed from names.
"""

import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from campaign.client.base import Outcome
from campaign.engines import failures, prometheus, runtimes
from campaign.engines import models as mirror
from campaign.engines.adapter import Adapter, plain
from campaign.engines.base import BootOrder, Counters, Launch, StepCounts
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Server

_PLACE = re.compile(r"\{([a-z_]+)\}")
PLACES = ("port", "model", "model_path", "python", "gpus", "context", "tp", "max_running_requests")
"""What a word of argv may hold, in braces."""


class CommandServer(Adapter):
    """The `Engine` contract for a declared server; `for_arm` gives the one of an arm."""

    name = "command"

    def __init__(self, server: Server | None = None) -> None:
        self._server = server

    def for_arm(self, arm: Arm) -> "CommandServer":
        """The adapter of this arm's server."""
        return CommandServer(arm.command)

    def preflight(self, arm: Arm, models: Mapping[str, Model]) -> None:
        server = _server(arm)
        for word in server.argv:
            for name in _PLACE.findall(word):
                if name not in PLACES:
                    raise PreflightError(
                        f"command.argv: {{{name}}} means nothing. Fix: one of {', '.join(f'{{{p}}}' for p in PLACES)}"
                    )
        if not any("{port}" in word for word in server.argv):
            raise PreflightError(
                "command.argv: nothing says the port. Fix: write {port} where the server takes it"
            )
        for kind, expression in server.failures.items():
            try:
                re.compile(expression)
            except re.error as error:
                raise PreflightError(
                    f"command.failures.{kind} = {expression}: {error}. Fix: correct the expression"
                ) from None
        first = server.argv[0]
        if not _PLACE.search(first) and shutil.which(first) is None:
            raise PreflightError(
                f"command.argv: {first}: no such program here. Fix: install it, or give its path"
            )
        if arm.model is not None and "{model_path}" in " ".join(server.argv):
            _model_path(models, arm.model)

    def launch(self, order: BootOrder, port: int) -> Launch:
        arm, server = order.config, _server(order.config)
        words: dict[str, str] = {
            "port": str(port),
            "model": self.model_id(order),
            "gpus": ",".join(map(str, order.gpus)),
        }
        for name in ("context", "tp", "max_running_requests"):
            if getattr(arm, name) is not None:
                words[name] = str(getattr(arm, name))
        text = " ".join(server.argv)
        if "{python}" in text:
            words["python"] = sys.executable if order.runtime is None else runtimes.python(order.runtime)
        if "{model_path}" in text:
            words["model_path"] = _model_path(order.models, arm.model)

        def put(match: re.Match[str]) -> str:
            if match[1] not in words:
                raise PreflightError(
                    f"command.argv: {match[0]} is not set in the arm. Fix: write `{match[1]}:`"
                )
            return words[match[1]]

        argv = tuple(_PLACE.sub(put, word) for word in server.argv)
        env = {"CUDA_VISIBLE_DEVICES": words["gpus"], **arm.env}
        headers = {}
        if server.key_env is not None:
            key = secrets.token_urlsafe(32)
            env[server.key_env] = key
            headers = {"Authorization": f"Bearer {key}"}
        return Launch(argv=(*argv, *arm.extra_args), env=env, headers=headers)

    def model_id(self, order: BootOrder) -> str:
        server = _server(order.config)
        return server.model_id or str(order.config.model)

    def metrics_path(self) -> str | None:
        return self._server.metrics if self._server else None

    @property
    def health_path(self) -> str:
        """Path that answers 200 once it serves."""
        return self._server.health if self._server else "/health"

    def info_paths(self) -> tuple[str, ...]:
        if self._server is None:
            return ()
        pages = [where.partition("#")[0] for where in self._server.effective.values()]
        return tuple(dict.fromkeys((*self._server.info, *pages)))

    def effective(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the declared pages say of the arm's fields; what they do not say is left out."""
        out: dict[str, Any] = {}
        for name, where in (self._server.effective if self._server else {}).items():
            path, _, key = where.partition("#")
            value: Any = info.get(path)
            for step in key.split("."):
                value = (
                    value[int(step)]
                    if isinstance(value, list) and step.isdecimal() and int(step) < len(value)
                    else (value.get(step) if isinstance(value, dict) else None)
                )
            if value is not None:
                out[name] = value
        return out

    def failure(self, log_tail: str) -> tuple[str, str] | None:
        own = self._server.failures if self._server else {}
        return failures.find(log_tail, [*(failures.pattern(k, e) for k, e in own.items()), *failures.COMMON])

    def read_counters(self, metrics_text: str) -> Counters:
        if self._server is None:
            return prometheus.read(metrics_text)
        found = prometheus.read_named(metrics_text, {str(k): v for k, v in self._server.counters.items()})
        if self._server.accepted_has_bonus and found.accepted is not None:
            if found.drafts is None or found.accepted < found.drafts:
                return replace(found, accepted=None, reasons=(*found.reasons, "accepted:out_of_range"))
            return replace(found, accepted=found.accepted - found.drafts)
        return found

    def steps(
        self, arm: Arm, before: Counters | None, after: Counters | None, outcome: Outcome
    ) -> StepCounts:
        """Without speculation in the arm, a token is a step; else the declared counters say, or nothing does."""
        usage = outcome.usage
        completion = usage.completion_tokens if usage else None
        cached = usage.cached_tokens if usage else None
        if (undrafted := plain(arm, outcome)) is not None:
            return undrafted
        d = prometheus.delta(before, after)
        if d.generated is not None and completion is not None and d.generated != completion:
            return StepCounts(None, None, None, None, None, None, cached, "metrics", ("other_traffic",))
        return replace(prometheus.step_counts(d, completion), cached_tokens=cached)

    def running(self, page: bytes) -> int | None:
        """Not declared, so not known."""
        del page
        return None

    def reset_path(self, arm: Arm) -> str | None:
        return _server(arm).reset


def _server(arm: Arm) -> Server:
    if arm.command is None:
        raise PreflightError("engine command: the arm has no `command:`. Fix: say argv and readiness there")
    return arm.command


def _model_path(models: Mapping[str, Model], name: str | None) -> str:
    from campaign.engines import weights

    model = weights.entry(models, name)
    mirrored = mirror.folder(model)
    if mirrored is not None:
        return str(mirrored)
    if model.hub is not None:
        return model.hub
    if model.path is not None:
        return str(Path(model.path).expanduser())
    return str(weights.find(model, str(name)))
