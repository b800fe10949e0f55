"""``ampaudit devices``: shows the devices of this machine and the catalog of accelerators."""

from __future__ import annotations

import click

from ampaudit.cli.options import debug_option, format_option
from ampaudit.cli.output import print_result


@click.command("devices")
@click.argument("name", required=False)
@format_option()
@debug_option
def devices_command(name: str | None, form: str, debug: bool) -> None:
    """Show what this machine and each generation of accelerators support, or one device by NAME."""
    from rich.console import Group
    from rich.text import Text

    from ampaudit.devices.catalogue import all_devices, device_named
    from ampaudit.devices.host import Devices, render_catalogue, render_device, render_machine, this_machine
    from ampaudit.render.json import to_json

    if name is not None:
        device = device_named(name)
        print_result(render_device(device), to_json(device) if form == "json" else None)
        return
    machine = this_machine()
    devices = Devices(1, machine, tuple(all_devices().values()))
    content = Group(render_machine(machine), Text(), render_catalogue())
    print_result(content, to_json(devices) if form == "json" else None)
