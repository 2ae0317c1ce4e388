"""A server that talks about its keys: in its log, in its own command line, in an address and in a header line.

`talking_server.py KEYS_FILE ENGINE_ARGS...` starts itself again with the key on its command line, as some servers
want it, and then is a llama.cpp server. The keys go to KEYS_FILE, for the test to look for.
"""

import os
import runpy
import sys
from pathlib import Path

KEY_ENV = "CAMPAIGN_API_KEY"


def main() -> None:
    if sys.argv[1] != "--api-key":
        os.execv(
            sys.executable, [sys.executable, "-I", __file__, "--api-key", os.environ[KEY_ENV], *sys.argv[1:]]
        )
    key, keys, args = sys.argv[2], sys.argv[3], sys.argv[4:]
    hub = os.environ.get("HF_TOKEN", "")
    with Path(keys).open("a", encoding="utf-8") as out:
        out.write(f"{key}\n{hub}\n")
    print(f"server_args=ServerArgs(api_key='{key}', port=0), argv: --api-key {key}", flush=True)
    print(f"GET http://me:{key}@127.0.0.1/v1/models?api_key={key}&n=1", flush=True)
    print(f"headers: {{'Authorization': 'Bearer {key}', 'x-plain': '{key}'}}", flush=True)
    print(f"downloading with {hub} as the token, bare", flush=True)
    sys.argv = ["llamacpp_server", *args]
    runpy.run_module("campaign.engines.llamacpp_server", run_name="__main__", alter_sys=True)


main()
