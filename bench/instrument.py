"""Clients of streamed tokens against one server that knows when it sent what.

    python bench/instrument.py --json FILE [--quick] [--venvs DIR]

Our client, the OpenAI SDK, httpx, aiohttp as `vllm bench serve` uses it, and the tools aiperf and guidellm,
each in a virtual environment of its own that this script makes (under --venvs, kept between runs). The server
is pinned to one core and the client to another. `--quick` runs our client, httpx and aiohttp in under three
minutes. What the figures mean, and a full run: docs/INSTRUMENT.md.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from campaign.testing.reference_server import ReferenceServer, Schedule

HERE = Path(__file__).parent
PACKAGES = {
    "httpx": ["httpx"],
    "aiohttp": ["aiohttp"],
    "openai": ["openai"],
    "aiperf": ["aiperf"],
    "guidellm": ["guidellm"],
}
SHAPES = {1: (93.0, 300), 32: (93.0, 300), 256: (93.0, 300), 1000: (10.0, 40)}
QUICK = {1: (93.0, 150), 32: (93.0, 200), 256: (93.0, 200)}
UNPACED = {"campaign": 200_000, "aiohttp": 50_000, "httpx": 50_000, "openai": 20_000}
TOOL_STREAMS = (1, 32, 256)
TTFT_MS = 50.0


def say(text):
    print(text, file=sys.stderr, flush=True)


def cores():
    """(server, client): two cores, the same one where there is no other."""
    have = sorted(os.sched_getaffinity(0))
    return have[-1], have[0]


def venv(folder, name):
    """Python of a peer's own environment, made where it is not there yet."""
    place = folder / name
    python = place / "bin" / "python"
    if not (place / ".ready").exists():
        say(f"{name}: making its environment")
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES[name]]
        subprocess.run(pip, check=True, capture_output=True)
        (place / ".ready").touch()
    return python


def get(url):
    with urllib.request.urlopen(url, timeout=60) as page:
        return json.load(page)


def rank(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, max(0, round(share * len(values) + 0.5) - 1))] if values else None


def rounded(value, digits=1):
    return None if value is None else round(value, digits)


def library(python, name, server, streams, tokens, rate, client_cpu, *, unpaced=False, limit=300):
    """One run of one client library: (what it printed, the server's stamps, the server's own figures)."""
    get(server.url + "/stamps"), get(server.url + "/stats")
    argv = [python, HERE / "instrument_client.py", name, server.url, str(streams), str(tokens), str(rate)]
    argv += ["--cpu", str(client_cpu), *(["--unpaced"] if unpaced else [])]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout), get(server.url + "/stamps"), get(server.url + "/stats")


def judged(seen, truth, stats, tokens):
    """Figures of one run against the server's stamps."""
    lags, user, ttft, rate, lost, events = [], [], [], [], 0, 0
    for one in seen["streams"]:
        true = truth[one["id"]]
        sends = [abs(s) for s in true["send_ns"]]
        at = one["stamps"]
        events += len(at)
        lost += tokens - len(at)
        # A negative stamp: the server was interrupted in that send.
        lags += [(a - s) / 1e3 for a, s in zip(at, true["send_ns"], strict=False) if s > 0]
        if one["user"]:
            user += [(a - s) / 1e3 for a, s in zip(one["user"], true["send_ns"], strict=False) if s > 0]
        ttft.append(((at[0] - one["sent"]) - (sends[0] - true["arrival_ns"])) / 1e6)
        if len(at) > 1 and len(at) == len(sends):
            rate.append(100 * ((sends[-1] - sends[0]) / (at[-1] - at[0]) - 1))
    capacity = stats["chunks"] / stats["cpu_s"] if stats["cpu_s"] else None
    out = {
        "cpu_us_per_chunk": rounded(1e6 * seen["cpu_s"] / events),
        "lag_p50_us": rounded(rank(lags, 0.5)),
        "lag_p99_us": rounded(rank(lags, 0.99)),
        "ttft_err_ms": rounded(statistics.median(map(abs, ttft)), 3),
        "rate_err_pct": rounded(statistics.median(map(abs, rate)), 4) if rate else None,
        "rss_mb": rounded(seen["rss_mb"]),
        "lost": lost,
        "merged": seen["merged"] if "campaign" in seen["source"] or seen["merged"] else 0,
        "server_late_p99_us": rounded(stats["late_p99_us"]),
        "server_load": rounded(events / seen["wall_s"] / capacity, 3) if capacity else None,
    }
    if user:
        out |= {"user_lag_p50_us": rounded(rank(user, 0.5)), "user_lag_p99_us": rounded(rank(user, 0.99))}
    return out


def measure(name, python, server, shapes, client_cpu, repeats):
    """All shapes of one client library; medians of `repeats` runs."""
    entry = {"streams": {}}
    for streams, (rate, tokens) in shapes.items():
        runs = []
        for _ in range(repeats):
            try:
                seen, truth, stats = library(python, name, server, streams, tokens, rate, client_cpu)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                say(f"  {name} {streams}: {error}")
                continue
            entry["version"] = seen["version"]
            runs.append(judged(seen, truth, stats, tokens))
        entry["streams"][str(streams)] = median_of(runs) if runs else None
        say(f"  {name} {streams}: {entry['streams'][str(streams)]}")
    best = []
    for _ in range(max(2, repeats)):
        count = UNPACED[name]
        seen, _, _ = library(python, name, server, 1, count, 93.0, client_cpu, unpaced=True)
        best.append(len(seen["streams"][0]["stamps"]) / seen["cpu_s"])
    entry["chunks_per_cpu_s"] = round(max(best))
    say(f"  {name}: {entry['chunks_per_cpu_s']} chunks per CPU second")
    return entry


def median_of(runs):
    return {
        key: None if any(r[key] is None for r in runs) else round(statistics.median(r[key] for r in runs), 4)
        for key in runs[0]
    }


def loaded(server, client_cpu):
    """Our client at 256 streams while another process keeps its core busy."""
    pin = f"import os;os.sched_setaffinity(0,{{{client_cpu}}})\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", pin])
    try:
        seen, truth, stats = library(sys.executable, "campaign", server, 256, 200, 93.0, client_cpu)
    finally:
        busy.kill()
        busy.wait()
    return judged(seen, truth, stats, 200)


def starts():
    """Start-time error of our client at 200 requests a second, from its own self-check."""
    done = subprocess.run(
        [sys.executable, "-m", "campaign", "selfcheck", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return json.loads(done.stdout)


# --- the tools: what they report of themselves, against the schedule


def tokenizer(python, folder):
    """A local tokenizer of whole words, so that no model has to be fetched."""
    place = folder / "tokenizer"
    code = (
        "import sys; from tokenizers import Tokenizer, models, pre_tokenizers as p;"
        "from transformers import PreTrainedTokenizerFast as F;"
        "v={w:i for i,w in enumerate(['<unk>','<eos>',*(f'w{i}' for i in range(2000)),'token'])};"
        "t=Tokenizer(models.WordLevel(v,unk_token='<unk>')); t.pre_tokenizer=p.Whitespace();"
        "F(tokenizer_object=t,unk_token='<unk>',eos_token='<eos>',pad_token='<eos>').save_pretrained(sys.argv[1])"
    )
    subprocess.run([python, "-c", code, place], check=True, capture_output=True)
    return place


def tool(argv, client_cpu, limit=240, *, offline=True):
    """Run a tool pinned to the client's core: (its CPU seconds, exit status, last words)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "NO_COLOR": "1"}
    if offline:
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        ["taskset", "-c", str(client_cpu), *map(str, argv)],
        check=False,
        capture_output=True,
        text=True,
        timeout=limit,
        env=env,
        stdin=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, done.returncode, (done.stdout + done.stderr)[-2000:], after.ru_maxrss / 1024


def aiperf(python, server, folder, streams, tokens, client_cpu):
    out = folder / f"aiperf-{streams}-{tokens}"
    shutil.rmtree(out, ignore_errors=True)
    argv = [
        python.with_name("aiperf"),
        "profile",
        "-m",
        "reference",
        "--url",
        server.url,
        "--endpoint-type",
        "chat",
    ]
    argv += [
        "--streaming",
        "--concurrency",
        streams,
        "--request-count",
        streams,
        "--tokenizer",
        folder / "tokenizer",
    ]
    argv += ["--osl", tokens, "--isl", 16, "--artifact-dir", out, "--ui", "none"]
    # Told to be offline, it looks for a snapshot of the hub and not for the folder it was given.
    cpu, code, words, rss = tool(argv, client_cpu, offline=False)
    found = next(out.rglob("profile_export_aiperf.json"), None)
    if code or found is None:
        raise RuntimeError(f"aiperf: {words[-300:]}")
    page = json.loads(found.read_text())
    return cpu, rss, page["time_to_first_token"]["p50"], 1000 / page["inter_token_latency"]["p50"]


def guidellm(python, server, folder, streams, tokens, client_cpu):
    out = folder / f"guidellm-{streams}-{tokens}.json"
    out.unlink(missing_ok=True)
    argv = [python.with_name("guidellm"), "run", "--disable-console"]
    argv += ["--backend", f"kind=openai_http,target={server.url},model=reference"]
    argv += [
        "--profile",
        f"kind=concurrent,streams={streams}",
        "--constraint",
        f"kind=max_requests,count={streams}",
    ]
    argv += ["--tokenizer", f"kind=huggingface_auto,model={folder / 'tokenizer'}"]
    argv += [
        "--data",
        f"kind=synthetic_text,prompt_tokens=16,output_tokens={tokens}",
        "--output",
        f"kind=json,path={out}",
    ]
    cpu, code, words, rss = tool(argv, client_cpu)
    if code or not out.exists():
        raise RuntimeError(f"guidellm: {words[-600:]}")
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]["median"]
    itl = metrics["inter_token_latency_ms"]["successful"]["median"]
    return cpu, rss, ttft, 1000 / itl


def tools(name, run, python, server, folder, client_cpu, shapes):
    """A tool's own TTFT and rate against the schedule; its CPU less that of a run of next to nothing."""
    entry = {"chunks_per_cpu_s": None, "streams": {}, "reasons": ["prints no stamp of an event: no lag"]}
    listed = subprocess.run(
        [python.with_name(name), "--version"], check=False, capture_output=True, text=True
    )
    entry["version"] = listed.stdout.strip().split()[-1] if listed.stdout.strip() else None
    base = None
    for streams, (_, tokens) in shapes.items():
        try:
            if base is None:
                run(python, server, folder, 1, 2, client_cpu)  # cold: files are read and compiled
                base, *_ = run(python, server, folder, 1, 2, client_cpu)
            get(server.url + "/stamps")
            cpu, rss, ttft, measured = run(python, server, folder, streams, tokens, client_cpu)
            truth = get(server.url + "/stamps").values()
        except Exception as error:  # a tool that does not run is a result, not an end
            say(f"  {name} {streams}: {error}")
            entry["streams"][str(streams)] = None
            entry["reasons"].append(f"{streams}: {type(error).__name__}: {str(error)[-200:]}")
            continue
        whole = [t for t in truth if len(t["send_ns"]) == tokens]
        sends = [[abs(s) for s in t["send_ns"]] for t in whole]
        true_ttft = statistics.median(
            (s[0] - t["arrival_ns"]) / 1e6 for s, t in zip(sends, whole, strict=True)
        )
        true_rate = statistics.median((len(s) - 1) / (s[-1] - s[0]) * 1e9 for s in sends)
        entry["streams"][str(streams)] = {
            "cpu_us_per_chunk": rounded(1e6 * (cpu - base) / sum(map(len, sends))),
            "lag_p50_us": None,
            "lag_p99_us": None,
            "ttft_err_ms": rounded(abs(ttft - true_ttft), 3),
            "rate_err_pct": rounded(100 * abs(measured / true_rate - 1), 4),
            "rss_mb": rounded(rss),
        }
        say(f"  {name} {streams}: {entry['streams'][str(streams)]}")
    return entry


def machine():
    model = next(
        (
            x.split(":", 1)[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if x[:10] == "model name"
        ),
        "",
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load1_before": os.getloadavg()[0],
    }


def command(argv):
    """The arguments that decide what is measured."""
    keep, skip = [], False
    for word in argv:
        if skip or word in {"--venvs", "--markdown"}:
            skip = not skip
        elif keep and keep[-1] == "--json":
            keep.append("FILE")
        else:
            keep.append(word)
    return keep


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, dest="out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--only", nargs="*", help="clients to run")
    parser.add_argument("--markdown", type=Path, help="page whose table of this benchmark is to be replaced")
    parser.add_argument(
        "--from-json", action="store_true", help="measure nothing: write --markdown from --json"
    )
    parser.add_argument("--venvs", type=Path, default=Path(".bench-venvs"))
    options = parser.parse_args()
    if options.from_json:
        write(options.markdown, json.loads(options.out.read_text()))
        return
    folder = options.venvs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shapes = QUICK if options.quick else SHAPES
    repeats = options.repeats or (1 if options.quick else 3)
    names = options.only or (["campaign", "httpx", "aiohttp"] if options.quick else ["campaign", *PACKAGES])
    server_cpu, client_cpu = cores()
    result = {"machine": machine(), "server": {}, "clients": {}}
    result["machine"]["command"] = " ".join(["python bench/instrument.py", *command(sys.argv[1:])])
    started = time.monotonic()
    with ReferenceServer(Schedule(ttft_ms=TTFT_MS, rate=93.0), cpu=server_cpu) as server:
        for name in names:
            say(name)
            python = Path(sys.executable) if name == "campaign" else venv(folder, name)
            if name in {"aiperf", "guidellm"}:
                tokenizer(python, folder)
                run = {"aiperf": aiperf, "guidellm": guidellm}[name]
                few = {k: v for k, v in shapes.items() if k in TOOL_STREAMS}
                entry = tools(name, run, python, server, folder, client_cpu, few)
            else:
                entry = measure(name, python, server, shapes, client_cpu, repeats)
            result["clients"][name] = entry
            options.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        if "campaign" in names:
            ours = result["clients"]["campaign"]
            ours["loaded_256"] = loaded(server, client_cpu)
            say(f"  campaign, its core busy: {ours['loaded_256']}")
            _, _, stats = library(sys.executable, "campaign", server, 256, 200, 93.0, client_cpu)
            result["server"] = {
                "ceiling_chunks_per_s": round(stats["chunks"] / stats["cpu_s"]),
                "jitter_p99_us": rounded(stats["late_p99_us"]),
            }
    if "campaign" in names:
        result["clients"]["campaign"]["selfcheck"] = starts()
    result["machine"]["load1_after"] = os.getloadavg()[0]
    result["machine"]["seconds"] = round(time.monotonic() - started)
    options.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    say(table(result))
    if options.markdown is not None:
        write(options.markdown, result)


def table(result):
    """The table of docs/INSTRUMENT.md."""
    lines = [
        "| client | version | chunks / CPU s | streams | CPU us / chunk | lag p50 us | lag p99 us | TTFT err ms | rate err % | MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = ("cpu_us_per_chunk", "lag_p50_us", "lag_p99_us", "ttft_err_ms", "rate_err_pct", "rss_mb")
    for name, entry in result["clients"].items():
        first = [name, entry.get("version"), shown(entry["chunks_per_cpu_s"])]
        for streams, row in entry["streams"].items():
            cells = [*first, f"{int(streams):,}"]
            cells += [shown(row[k]) for k in keys] if row else ["did not run", *["-"] * 5]
            lines.append("| " + " | ".join("-" if c is None else str(c) for c in cells) + " |")
            first = ["", "", ""]
    return "\n".join(lines)


def shown(value):
    """A number for a table."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def targets(result):
    """(target, what was measured, whether it is met) of each target that this run speaks of."""
    ours = result["clients"].get("campaign")
    if ours is None:
        return []
    found = []
    speed = ours["chunks_per_cpu_s"]
    peers = {n: e["chunks_per_cpu_s"] for n, e in result["clients"].items() if n != "campaign"}
    peers = {n: v for n, v in peers.items() if v}
    found.append(("at least 250,000 chunks per CPU second", f"{speed:,}", speed >= 250_000))
    if peers:
        best = max(peers, key=peers.get)
        ratio = speed / peers[best]
        found.append(("3 times the best peer", f"{ratio:.1f} times {best}", ratio >= 3))
    for streams in ("256", "1000"):
        if row := ours["streams"].get(streams):
            got = f"{shown(row['lag_p50_us'])}; {shown(row['lag_p99_us'])}"
            met = row["lag_p50_us"] <= 20 and row["lag_p99_us"] <= 50
            found.append((f"lag p50 at most 20 us, p99 50 us, {int(streams):,} streams", got, met))
    if row := ours.get("loaded_256"):
        got = f"{shown(row['lag_p99_us'])} (user stamps p99 {shown(row.get('user_lag_p99_us'))})"
        found.append(("lag p99 at most 50 us, client's core fully loaded", got, row["lag_p99_us"] <= 50))
    if row := ours["streams"].get("256"):
        cpu = row["cpu_us_per_chunk"]
        found.append(("at most 15 us of CPU a chunk at 256 streams", shown(cpu), cpu <= 15))
    if row := ours["streams"].get("32"):
        got = f"{shown(row['rate_err_pct'])} %; {shown(row['ttft_err_ms'])} ms"
        met = row["rate_err_pct"] <= 0.1 and row["ttft_err_ms"] <= 1
        found.append(("rate error at most 0.1 %, TTFT error 1 ms, 32 streams", got, met))
    if check := ours.get("selfcheck"):
        late = check["start_err_p99_us"]
        found.append(("start error p99 at most 1,000 us at 200 requests/s", shown(late), late <= 1000))
    if row := ours["streams"].get("1000"):
        got = f"{shown(row['rss_mb'])} MB; {row['lost']:g} lost, {row['merged']:g} merged"
        met = row["rss_mb"] < 500 and not row["lost"] and not row["merged"]
        found.append(("1,000 streams under 500 MB, none lost or merged", got, met))
    return found


BEGIN, END = "<!-- bench/instrument.py: begin -->", "<!-- bench/instrument.py: end -->"


def page(result):
    """What a run says, as it stands in docs/INSTRUMENT.md."""
    m, server = result["machine"], result["server"]
    load = f"load average {m['load1_before']:.1f} before, {m.get('load1_after', 0):.1f} after"
    lines = [
        (
            f"`{m['command']}`, {m.get('seconds', 0):,} s. {m['cores']} cores ({m['cpu']}), Linux {m['kernel']}, "
            f"Python {m['python']}; {load} (the run itself keeps about 1)."
        ),
    ]
    if server:
        lines[0] += (
            f" The server could send {server['ceiling_chunks_per_s']:,} chunks/s and was late by "
            f"{shown(server['jitter_p99_us'])} us (p99) at 256 streams."
        )
    lines += ["", table(result), ""]
    for name, entry in result["clients"].items():
        lines += [f"- {name}: {reason}" for reason in entry.get("reasons", ())]
    lines += ["", "| target | here | met |", "|---|---|---|"]
    lines += [f"| {what} | {got} | {'yes' if met else 'no'} |" for what, got, met in targets(result)]
    return "\n".join(lines)


def write(path, result):
    """Put the run between the two marks of the page."""
    text = path.read_text()
    head, found, rest = text.partition(BEGIN)
    _, found_end, tail = rest.partition(END)
    if not found or not found_end:
        raise SystemExit(f"{path} has no place for the table: {BEGIN} ... {END}")
    path.write_text(f"{head}{BEGIN}\n{page(result)}\n{END}{tail}")


if __name__ == "__main__":
    main()
