"""Checks Kubernetes manifests without a cluster: python3 check_manifests.py FILE...

Core kinds go through kubernetes-validate's schemas, strictly; other kinds through the closed schemas in tests/manifests/schemas.
A kind that neither knows is an error. `--typos` misspells every field of every kind in turn, and fails when one passes.
"""

import copy
import pathlib
import sys

import jsonschema
import kubernetes_validate
import referencing
import yaml

KUBERNETES_VERSION = "1.37"
SCHEMAS = pathlib.Path(__file__).parents[1] / "manifests" / "schemas"
# Maps whose keys are names that people choose, so that no schema can know them.
FREE_MAPS = {"labels", "annotations", "matchLabels", "data", "requests", "limits"}


def load_schemas():
    parts = {path.name: yaml.safe_load(path.read_text()) for path in SCHEMAS.glob("*.yaml")}
    draft = referencing.jsonschema.DRAFT202012
    registry = referencing.Registry().with_resources(
        (name, draft.create_resource(part)) for name, part in parts.items()
    )
    validators = {}
    for part in parts.values():
        fields = part["properties"]
        if "kind" in fields:
            key = (fields["apiVersion"]["const"], fields["kind"]["const"])
            validators[key] = jsonschema.Draft202012Validator(part, registry=registry)
    return validators


VALIDATORS = load_schemas()


def fault(document):
    """What is wrong with a document, or None."""
    validator = VALIDATORS.get((document.get("apiVersion"), document.get("kind")))
    if validator is not None:
        error = jsonschema.exceptions.best_match(validator.iter_errors(document))
        return error and f"{error.json_path}: {error.message}"
    if missing := {"apiVersion", "kind"} - document.keys():
        return f"{' and '.join(sorted(missing))} missing"
    try:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        path = "/".join(str(step) for step in getattr(error, "path", []))
        return f"{path}: {getattr(error, 'message', error)}"
    return None


def field_paths(value, path=()):
    """The path of every field whose name a schema gives."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield path + (key,)
            selects_pods = key == "selector" and all(isinstance(label, str) for label in part.values())
            if key not in FREE_MAPS and not selects_pods:
                yield from field_paths(part, path + (key,))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from field_paths(part, path + (index,))


def misspelled(document, path):
    changed = copy.deepcopy(document)
    parent = changed
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1] + "x"] = parent.pop(path[-1])
    return changed


def main(arguments):
    typos = "--typos" in arguments
    files = [pathlib.Path(name) for name in arguments if not name.startswith("--")]
    if not files:
        sys.exit(__doc__)
    faults, documents, tried = [], 0, 0
    seen = set()
    for file in files:
        for document in yaml.safe_load_all(file.read_text()):
            documents += 1
            name = f"{file.name}: {document.get('kind')} {document.get('metadata', {}).get('name')}"
            if found := fault(document):
                faults.append(f"{name}: {found}")
                continue
            if not typos:
                continue
            for path in field_paths(document):
                # The same field of the same kind is misspelled once, wherever it stands in a list.
                key = (document["kind"], tuple(step for step in path if isinstance(step, str)))
                if key in seen:
                    continue
                seen.add(key)
                tried += 1
                if fault(misspelled(document, path)) is None:
                    faults.append(f"{name}: nobody notices that {'.'.join(map(str, path))} is misspelled")
    for line in faults:
        print(line)
    print(f"{documents} documents, {len(faults)} faults" + (f", {tried} fields misspelled" if typos else ""))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
