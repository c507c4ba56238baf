"""Renders the overlays of configs/kubernetes with `kubectl kustomize`: python3 render.py

The first line of each file has the digests of everything it was made from and of what was rendered.
`python3 render.py --check` sees by them, without kubectl, that a file is older than its overlay or was changed by hand.
"""

import hashlib
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parents[2] / "configs" / "kubernetes"
OVERLAYS = ["cpu", "cuda", "canary", "image-volume", "argo-rollouts"]


def source_digest():
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(SOURCE)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def first_line(text):
    return f"# Made by render.py from sha256:{source_digest()} as sha256:{hashlib.sha256(text.encode()).hexdigest()}\n"


def render(overlay):
    command = ["kubectl", "kustomize", SOURCE / overlay]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return first_line(text) + text


def is_current(path):
    line, text = path.read_text().split("\n", 1)
    return line + "\n" == first_line(text)


if __name__ == "__main__":
    paths = {overlay: HERE / f"{overlay}.yaml" for overlay in OVERLAYS}
    if "--check" in sys.argv:
        if stale := [path.name for path in paths.values() if not is_current(path)]:
            sys.exit(f"{', '.join(stale)}: not what configs/kubernetes renders to; run python3 {__file__}")
    else:
        for overlay, path in paths.items():
            path.write_text(render(overlay))
