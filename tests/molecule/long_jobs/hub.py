"""A slow hub on the loopback interface: serves one random file, and says in FOLDER/hub.json where and how much it sent.

Runs until FOLDER/stop exists.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests" / "unit"))

from hub_server import Server

NAME, SIZE, PAUSE = "model.gguf", 160 << 20, 0.15


def main() -> None:
    """Serve."""
    folder = Path(sys.argv[1])
    content = random.Random(5).randbytes(SIZE)
    digest = hashlib.sha256(content).hexdigest()
    with Server({f"org/repo/resolve/main/{NAME}": content}, token="molecule-secret", pause=PAUSE) as hub:
        while not (folder / "stop").exists():
            file = {"path": NAME, "size": SIZE, "sha256": digest}
            facts = {"url": f"{hub.url}/org/repo/resolve/main", "files": [file], "sent": hub.sent}
            (folder / "hub.tmp").write_text(json.dumps(facts))
            (folder / "hub.tmp").replace(folder / "hub.json")
            time.sleep(0.2)


if __name__ == "__main__":
    main()
