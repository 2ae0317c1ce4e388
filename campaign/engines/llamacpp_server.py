"""A llama.cpp server process over xllamacpp: `python -m campaign.engines.llamacpp_server --model F --port P`.

xllamacpp carries llama.cpp's own HTTP server but no executable. Every flag is typed and explicit, unknown
ones end the process with status 2 before the weights are read, and nothing that llama.cpp would adjust by
itself (context fitted to memory, host prompt cache, port reuse) is left on. The API key comes in the
environment (`CAMPAIGN_API_KEY`), never in argv, which any user of the machine can read.
Written against xllamacpp 2026.10.11549.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

API_KEY_ENV = "CAMPAIGN_API_KEY"
KV_DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""What llama.cpp's `--cache-type-k` and `-v` take."""
SPEC_TYPES = (
    "none",
    "draft-simple",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line. Also used to check an arm before anything is started."""
    p = argparse.ArgumentParser(prog="llamacpp_server", allow_abbrev=False)
    p.add_argument("--model", required=True, help="GGUF file")
    p.add_argument("--alias", required=True, help="name under which the model is listed")
    p.add_argument("--port", required=True, type=_count)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--threads", type=_count, default=1)
    p.add_argument("--threads-batch", type=_count, help="threads of prefill; --threads if left out")
    p.add_argument("--threads-http", type=_count, default=2)
    p.add_argument("--context", type=_count, default=2048, help="tokens of one request")
    p.add_argument("--parallel", type=_count, default=1, help="requests that run at once")
    p.add_argument("--batch", type=_count, default=2048)
    p.add_argument("--ubatch", type=_count, default=512)
    p.add_argument("--kv-dtype", choices=KV_DTYPES, default="f16")
    p.add_argument("--flash-attn", choices=("auto", "on", "off"), default="auto")
    p.add_argument("--prefix-cache", choices=("on", "off"), default="off")
    p.add_argument("--gpu-layers", type=_natural, default=0)
    p.add_argument("--poll", type=_natural, help="0 waits without spinning, 100 spins")
    p.add_argument("--mmap", choices=("on", "off"), default="on")
    p.add_argument("--spec-type", choices=SPEC_TYPES, default="none")
    p.add_argument("--spec-depth", type=_natural, default=0, help="drafted tokens per step, at most")
    p.add_argument("--spec-ngram-size", type=_count, default=3, help="tokens that an n-gram drafter matches")
    p.add_argument("--spec-min-hits", type=_count, default=1)
    p.add_argument("--spec-draft-model", help="GGUF file of a draft model")
    p.add_argument("--verbosity", type=_natural, default=3, help="4 prints KV types and drafters")
    return p


def _enum(enum: Any, prefix: str, name: str) -> Any:
    return enum[prefix + name.upper().replace("-", "_")]


def params(x: Any, args: argparse.Namespace) -> Any:
    """`xllamacpp.CommonParams` of a parsed command line; `x` is the xllamacpp module."""
    p = x.CommonParams()
    p.model.path = args.model
    p.model_alias = {args.alias}
    p.hostnames = [args.host]
    p.port = args.port
    p.reuse_port = False  # a second listener on the port would share its requests silently
    p.n_threads_http = args.threads_http
    p.n_parallel = args.parallel
    # llama.cpp splits n_ctx over the slots; --context is what one request may use.
    p.n_ctx = args.context * args.parallel
    p.kv_unified = False
    p.fit_params = False  # would shrink the context to fit memory, and say so only in the log
    p.n_batch, p.n_ubatch = args.batch, args.ubatch
    p.n_gpu_layers = args.gpu_layers
    kv = _enum(x.ggml_type, "GGML_TYPE_", args.kv_dtype)
    p.cache_type_k, p.cache_type_v = kv, kv
    flash = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}[args.flash_attn]
    p.flash_attn_type = x.llama_flash_attn_type["LLAMA_FLASH_ATTN_TYPE_" + flash]
    p.load_mode = x.llama_load_mode["LLAMA_LOAD_MODE_" + ("MMAP" if args.mmap == "on" else "NONE")]
    for cpu, threads in ((p.cpuparams, args.threads), (p.cpuparams_batch, args.threads_batch)):
        cpu.n_threads = threads or args.threads
        if args.poll is not None:
            cpu.poll = args.poll
    reuse = args.prefix_cache == "on"
    p.cache_prompt = reuse
    p.cache_idle_slots = reuse
    if not reuse:
        p.cache_ram_mib = 0
        p.n_ctx_checkpoints = 0
    p.warmup = True
    p.offline = True
    p.ui = False
    p.endpoint_metrics = p.endpoint_props = p.endpoint_slots = True
    p.verbosity = args.verbosity
    key = os.environ.get(API_KEY_ENV)
    if key:
        p.api_keys = [key]
    _speculation(x, p, args)
    return p


def _speculation(x: Any, p: Any, args: argparse.Namespace) -> None:
    s = p.speculative
    s.types = [_enum(x.common_speculative_type, "COMMON_SPECULATIVE_TYPE_", args.spec_type)]
    if args.spec_type == "none":
        return
    s.draft.n_max = args.spec_depth
    s.draft.n_min = 0
    for drafter in (s.ngram_simple, s.ngram_map_k, s.ngram_map_k4v):
        drafter.size_n = args.spec_ngram_size
        drafter.size_m = args.spec_depth
        drafter.min_hits = args.spec_min_hits
    s.ngram_mod.n_match = args.spec_ngram_size
    s.ngram_mod.n_min, s.ngram_mod.n_max = 1, args.spec_depth
    if args.spec_draft_model:
        s.draft.mparams.path = args.spec_draft_model
        s.draft.cpuparams.n_threads = s.draft.cpuparams_batch.n_threads = args.threads


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the process that owns us (see `guard`)."""
    args = parser().parse_args(argv)
    if not os.path.isfile(args.model):  # noqa: PTH113  # pathlib costs start-up time that boots pay for
        sys.exit(f"error: model file not found: {args.model}")
    import xllamacpp

    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before the server's threads, which inherit it
    try:
        server = xllamacpp.Server(params(xllamacpp, args))
    except RuntimeError as error:
        sys.exit(f"error: the server did not start, see the lines above ({error})")
    print(f"listening on {server.listening_address}", flush=True)  # the host reads the log
    signal.sigwait(stop)
    os._exit(0)  # no thread of the server can hold the exit up


if __name__ == "__main__":
    main()
