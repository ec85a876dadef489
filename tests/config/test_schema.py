"""The JSON Schema of recipes: it accepts what fcsd accepts, and refuses the mistakes that an editor should show."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fcsd import recipes
from fcsd.cli.main import app
from fcsd.config import Recipe, load_recipe
from fcsd.config.recipe import recipe_schema
from fcsd.recipes import strict_yaml

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": (int, float)}
CHECKED = {"$ref", "anyOf", "type", "enum", "const", "required", "properties", "additionalProperties", "items"}
CHECKED |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems"}
SHOWN = {"title", "description", "default", "$defs", "$schema", "pattern", "maxItems"}


def accepts(schema: Any, value: Any, root: Any) -> bool:
    """Whether a value is valid by the keywords that the schema of recipes uses."""
    if isinstance(schema, bool):
        return schema
    assert schema.keys() <= CHECKED | SHOWN, schema.keys()
    if "$ref" in schema and not accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root):
        return False
    if "anyOf" in schema and not any(accepts(one, value, root) for one in schema["anyOf"]):
        return False
    kind = schema.get("type")
    if kind == "integer" and not (isinstance(value, int | float) and value == int(value)):
        return False
    if kind in TYPES and (not isinstance(value, TYPES[kind]) or (kind == "number" and isinstance(value, bool))):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        inside = all(accepts(known.get(key, others), item, root) for key, item in value.items())
        return inside and set(schema.get("required", [])) <= value.keys()
    if isinstance(value, list):
        long_enough = len(value) >= schema.get("minItems", 0)
        return long_enough and all(accepts(schema.get("items", True), item, root) for item in value)
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, int | float):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
        return low <= value <= high and above < value < below
    return True


@pytest.fixture(scope="module")
def schema() -> Any:
    done = CliRunner().invoke(app, ["recipes", "schema"])
    assert done.exit_code == 0
    assert json.loads(CliRunner().invoke(app, ["recipes", "schema", "--json"]).stdout) == json.loads(done.stdout)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", recipes.names())
def test_packaged_recipes_are_valid_as_written_and_in_full(name: str, schema: Any) -> None:
    written, _ = strict_yaml.parse(recipes.read(name), name)
    assert accepts(schema, written, schema)
    assert accepts(schema, load_recipe(name).recipe.model_dump(), schema)


GOOD: dict[str, Any] = {"name": "a", "model": "m", "output_dir": "o", "data": {"sources": [{"path": "p"}]}}
MISTAKES: dict[str, dict[str, Any]] = {
    "a key that does not exist": {"optim": {"lrr": 1e-5}},
    "a section that does not exist": {"optimizer": {}},
    "a word instead of a number": {"optim": {"lr": "high"}},
    "half a step": {"train": {"steps": 1.5}},
    "a number below its limit": {"train": {"micro_batch_size": 0}},
    "a word that is none of those allowed": {"train": {"dtype": "fp8"}},
    "no source": {"data": {"sources": []}},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: str, schema: Any) -> None:
    assert accepts(schema, GOOD, schema) and not accepts(schema, GOOD | MISTAKES[mistake], schema)


def test_a_recipe_is_complete_or_has_a_base(schema: Any) -> None:
    without_model = {key: value for key, value in GOOD.items() if key != "model"}
    assert not accepts(schema, without_model, schema)
    assert accepts(schema, {"base": "tiny", "data": {"seq_len": 128}}, schema)


def test_every_field_has_its_meaning() -> None:
    schema = recipe_schema()
    assert set(schema["properties"]) == {"base", *Recipe.model_fields}
    sections = [schema, *schema["$defs"].values()]
    fields = [field for section in sections for field in section.get("properties", {}).values()]
    assert len(fields) > 60
    for field in fields:  # pydantic leaves out a description that is that of the section itself
        assert field.get("description") or schema["$defs"][field["$ref"].rpartition("/")[2]]["description"]
