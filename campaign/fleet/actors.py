"""Ray actors around the plain asyncio classes, and the proxy that calls them with a deadline.

The classes know nothing of Ray. Ray's own retries are off: it would repeat a measured request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from campaign.errors import RayError

Deadline = float | Callable[..., float]

DEFAULT_DEADLINE_S = 60.0


def spawn(cls: type[Any], *args: Any, concurrency: int = 64, **kwargs: Any) -> Any:
    """Start an actor of `cls`. It reserves no CPU: what measures must not be scheduled around."""
    import ray

    actor: Any = ray.remote(max_restarts=0, max_task_retries=0, num_cpus=0)(cls)
    return actor.options(max_concurrency=concurrency).remote(*args, **kwargs)


class Remote:
    """Calls an actor's coroutines as if it were the object itself; every call has a deadline.

    An exception raised by the class comes out as itself; whatever befell the actor, its node or Ray
    (died, unavailable, out of memory, object lost, owner died, no answer) comes out as RayError.
    """

    def __init__(self, actor: Any, deadlines: Mapping[str, Deadline] | None = None) -> None:
        self._actor = actor
        self._deadlines = dict(deadlines or {})

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            import ray

            rule = self._deadlines.get(name, DEFAULT_DEADLINE_S)
            seconds = rule(*args, **kwargs) if callable(rule) else rule
            try:
                reference = getattr(self._actor, name).remote(*args, **kwargs)
                return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
            except TimeoutError as error:
                raise RayError(f"actor call {name} did not answer within {seconds:g} s") from error
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or RayError(str(error))) from None
            except ray.exceptions.RayError as error:
                raise RayError(f"actor call {name}: {type(error).__name__}: {error}") from error

        return call

    def kill(self) -> None:
        """End the actor's process now."""
        import ray

        ray.kill(self._actor, no_restart=True)
