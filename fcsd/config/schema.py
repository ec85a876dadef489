"""The JSON Schema of recipes, by which an editor completes keys, shows what they mean, and underlines mistakes."""

from typing import Any

from fcsd.config.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a recipe, as data that can be written as JSON.

    It knows keys, types, limits and meanings. Rules between several keys are checked by ``load_recipe`` alone. A recipe
    with a ``base`` may leave out what the base gives, inside sections too, so nothing inside a section is required.
    """
    schema = Recipe.model_json_schema()
    for section in schema["$defs"].values():
        section.pop("required", None)
    base = {"type": "string", "description": "The recipe, packaged or a path, that gives every value left out here."}
    schema["properties"] = {"base": base, **schema["properties"]}
    complete = {"required": schema.pop("required")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "anyOf": [complete, {"required": ["base"]}],
    }
