"""Arms that share GPUs, asked for by naming a resident design: whether their memory fits, and whether it is equal.

SGLang takes `memory_fraction` of what is free when it starts, so of two engines with the same fraction the second
gets less (0.5.14, read in its source). Equal settings in both places need a cap on the KV pool that is the same for
all, `--max-total-tokens`; a fraction is then only an upper bound, and each start finds what those before it left.
vLLM and servers of your own are taken to mean a share of the whole, so theirs add up.
"""

from campaign.errors import Problem, SpecError
from campaign.plan.expand import Draft
from campaign.spec.models import Arm

ROOM = 0.95
"""Share of a GPU that arms may ask for together; contexts and graphs lie outside of their fractions."""
CAP = "--max-total-tokens"


def kv_cap(arm: Arm) -> str | None:
    """Tokens to which an SGLang arm caps its KV pool; None where it caps nothing."""
    if arm.engine != "sglang":
        return None
    for i, word in enumerate(arm.extra_args):
        name, eq, value = word.partition("=")
        if name == CAP:
            return value if eq else next(iter(arm.extra_args[i + 1 : i + 2]), None)
    return None


def require(draft: Draft) -> None:
    """Raises SpecError where an arm does not say how much it takes, or all take more than there is."""
    for arm in draft.arms:
        if arm.config.memory_fraction is None and arm.config.engine in {"sglang", "vllm"}:
            raise _problem(
                f"arms.{arm.name.partition('#')[0]}.memory_fraction",
                "null",
                f"{draft.where} puts {len(draft.arms)} arms on one GPU, and the engine would take all of it",
                f"declare it in every arm, together at most {ROOM:g}",
            )
    total = _total(draft)
    if total > ROOM and not _capped(draft):
        shares = " + ".join(f"{arm.config.memory_fraction or 0:g} ({arm.name})" for arm in draft.arms)
        raise _problem(
            f"{draft.where}.design",
            draft.design,
            f"the arms share GPUs and ask for {shares} = {total:g} of their memory",
            f"lower memory_fraction to {ROOM:g} in all, or cap the KV pool of every SGLang arm ({CAP} in extra_args)",
        )


def notes(draft: Draft) -> tuple[str, ...]:
    """What the plan says of arms that share GPUs."""
    sizes = {kv_cap(arm.config) for arm in draft.arms}
    if _capped(draft):
        caps = ", ".join(sorted(str(s) for s in sizes))
        said = f"{draft.where}: {len(draft.arms)} arms share the node's first GPUs; KV pools are capped at {caps} tokens, "
        return (said + "memory_fraction is an upper bound of what is free at each start",)
    said = f"{draft.where}: {len(draft.arms)} arms share the node's first GPUs, {_total(draft):g} of their memory together"
    if any(arm.config.engine == "sglang" for arm in draft.arms):
        said += f"; SGLang's fraction is one of what is free at the start, so pools differ by place: give all the same {CAP}"
    return (said,)


def _capped(draft: Draft) -> bool:
    return all(kv_cap(arm.config) is not None for arm in draft.arms)


def _total(draft: Draft) -> float:
    return round(sum(arm.config.memory_fraction or 0.0 for arm in draft.arms), 6)


def _problem(field: str, value: str, why: str, fix: str) -> SpecError:
    return SpecError((Problem("experiments.yaml", None, field, value, why, fix),))
