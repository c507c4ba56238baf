"""Renders the overlays of configs/kubernetes with `kubectl kustomize`: python3 render.py

The first line of each file has the digest of everything it was made from, so that a stale one is noticed without kubectl.
"""

import hashlib
import pathlib
import subprocess

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parents[2] / "configs" / "kubernetes"
OVERLAYS = ["cpu", "cuda", "canary", "image-volume", "argo-rollouts"]


def source_digest():
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*")):
        if path.is_file() and path.name != "README.md":
            digest.update(f"{path.relative_to(SOURCE)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def render(overlay):
    command = ["kubectl", "kustomize", SOURCE / overlay]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f"# Made by render.py from sha256:{source_digest()}\n{text}"


if __name__ == "__main__":
    for overlay in OVERLAYS:
        (HERE / f"{overlay}.yaml").write_text(render(overlay))
