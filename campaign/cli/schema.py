"""`campaign schema`: the grammar for editors."""

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The same; JSON is the default.")
@click.option("--markdown", is_flag=True, help="Tables for people instead: fields, defaults, meaning.")
def command(*, as_json: bool, markdown: bool) -> None:  # noqa: ARG001 - --json is what happens anyway
    """Print the JSON Schema of experiments.yaml.

    For VS Code (YAML extension) save it and put this line first in the file:
    `# yaml-language-server: $schema=campaign.schema.json`
    """
    import json

    from campaign.spec import schema

    text = schema.markdown() if markdown else json.dumps(schema.json_schema(), indent=2, ensure_ascii=False)
    click.echo(text)
