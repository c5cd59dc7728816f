"""``tpu-kernels cache``: what is kept in the cache folder, why a call finds nothing there, and
moving tuned records between machines and tuners."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_kernels.cli.argspec import empty_tensor
from tpu_kernels.cli.arguments import add_call_arguments, call_arguments, targets
from tpu_kernels.cli.kernels import add_import_option, find_kernel, load_kernels
from tpu_kernels.cli.output import Output
from tpu_kernels.errors import ArgumentError

if TYPE_CHECKING:
    from tpu_kernels.tuning.stores import Stores

DESCRIPTION = """\
The cache folder holds tuned records, compiled CPU programs and results of the TPU compiler. Exit
code 1: `verify` found damage, `explain` found no record, `import` wrote nothing.
"""
FORMATS = ("own", "tokamax", "helion", "tables")
_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their options."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(
        name: str, help_text: str, perform: Callable[[argparse.Namespace, Output], bool]
    ) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=help_text, description=help_text)
        made.set_defaults(perform=perform)
        # Declared here too, so that it may stand behind the action's own words.
        made.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print one JSON document instead of tables",
        )
        return made

    made = action("list", "what is stored", _list)
    _add_store_option(made)
    made.add_argument("--kernel", metavar="NAME", help="only what belongs to this kernel")
    made = action("show", "one entry in full", _show)
    made.add_argument("identity", metavar="DIGITS", help="its first digits, as `list` shows them")
    made = action("explain", "the record that a call finds or, by fields, why none", _explain)
    add_call_arguments(made)
    _add_target_option(made)
    add_import_option(made)
    made = action("export", "write tuned records into one file", _export)
    made.add_argument("file", type=Path, metavar="FILE")
    made.add_argument("--kernel", metavar="NAME", help="only records of this kernel")
    made.add_argument("--target", metavar="CHIP", help="only records for this chip")
    _add_format_option(made)
    add_import_option(made)
    made = action("import", "add tuned records from a file", _import)
    made.add_argument("file", type=Path, metavar="FILE")
    made.add_argument(
        "kernel", metavar="KERNEL", nargs="?", help="ours that foreign results are for"
    )
    made.add_argument(
        "arguments",
        metavar="ARGUMENT",
        nargs="*",
        default=[],
        help="the call that a config of Helion is for, as for `tune`",
    )
    made.add_argument("--overwrite", action="store_true", help="replace records of the same calls")
    made.add_argument("--target", default=None, metavar="CHIP", help="chip of foreign results")
    made.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="THEIRS=OURS",
        help="name of an argument or parameter in foreign results, and in the kernel",
    )
    _add_format_option(made)
    add_import_option(made)
    made = action("prune", "delete what is damaged, left over, too much or too old", _prune)
    _add_store_option(made)
    made.add_argument("--max-mib", type=float, metavar="MIB", help="room for programs and results")
    made.add_argument("--unused-days", type=float, metavar="DAYS", help="delete what is older")
    made = action("verify", "check every file", _verify)
    _add_store_option(made)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Perform the action."""
    return bool(options.perform(options, output))


def _list(options: argparse.Namespace, output: Output) -> bool:
    stores = _open()
    entries = stores.entries(options.store or _all(), options.kernel)
    output.document(
        {
            "folder": str(stores.folder),
            "entries": [
                {**vars(e), "path": str(e.path), "used": _day(e.used, full=True)} for e in entries
            ],
        }
    )
    rows = [(e.store, e.identity[:12], e.kernel, e.what, e.bytes, _day(e.used)) for e in entries]
    columns = ("store", "entry", "kernel", "holds", "bytes", "used")
    if rows:
        output.table("", columns, rows)
    size = sum(e.bytes for e in entries) / _MIB
    output.line(f"{len(entries)} entries, {size:.1f} MiB in {stores.folder}")
    return True


def _show(options: argparse.Namespace, output: Output) -> bool:
    stores = _open()
    entry = stores.find(options.identity)
    detail = stores.detail(entry)
    output.document({**vars(entry), "path": str(entry.path), "content": detail})
    output.line(f"{entry.store} {entry.identity}\n{entry.kernel}: {entry.what}\n{entry.path}")
    output.line(json.dumps(detail, indent=2))
    return True


def _explain(options: argparse.Namespace, output: Output) -> bool:
    from tpu_kernels.tuning import lookup

    kernel = find_kernel(options.kernel, options.imports)
    args, kwargs = call_arguments(options.arguments, empty_tensor)
    answers = {}
    for target in targets(options.target):
        request = kernel.bind(*args, **kwargs).request(target)
        choice = kernel.config_for(*args, target=target, **kwargs)
        told = lookup.source().explain(request)
        found = choice.provenance in ("tuned", "bucket", "shipped")
        answers[target] = {
            "found": found,
            "config": choice.config,
            "provenance": choice.provenance,
            "explanation": told,
        }
        values = ", ".join(f"{k}={v!r}" for k, v in choice.config.items())
        output.line(f"{kernel.name} on {target}: {values or 'no tunables'} ({choice.provenance})")
        output.line("  " + told.replace("\n", "\n  "))
    output.document({"kernel": kernel.name, "targets": answers})
    return all(answer["found"] for answer in answers.values())


def _export(options: argparse.Namespace, output: Output) -> bool:
    from tpu_kernels.tuning import exchange, foreign

    cache = _open().tuned

    def wanted(record: object) -> bool:
        key = getattr(record, "key", None)
        known = key if isinstance(key, dict) else {}
        return (options.kernel in (None, known.get("kernel"))) and (
            options.target in (None, known.get("target"))
        )

    if options.format == "tables":
        from tpu_kernels.tuning.shipping import write_tables

        done = write_tables(filter(wanted, cache), options.file, load_kernels(options.imports))
        files, written = [str(file) for file in done.files], done.written
        output.document({"files": files, "written": written, "left_out": list(done.left_out)})
        output.line(f"{written} records written to {len(files)} tables in {options.file}")
        for reason in sorted(set(done.left_out)):
            output.line(f"  left out: {reason}")
        return written > 0
    if options.format == "helion":
        records = [record for record in cache if wanted(record)]
        if len(records) != 1:
            raise ArgumentError(
                f"{len(records)} records fit; a file of Helion holds the config of one",
                hint="choose by --kernel and --target",
            )
        options.file.write_text(json.dumps(records[0].config, indent=2) + "\n", encoding="utf-8")
        written = 1
    elif options.format == "tokamax":
        if options.kernel is None or options.target is None:
            raise ArgumentError(
                "a file of tokamax holds one kernel and one chip",
                hint="choose by --kernel and --target",
            )
        kernels = load_kernels(options.imports).values()
        names = {
            k.name: [p.name for p in k.spec.op_parameters if p.kind.is_tensor] for k in kernels
        }
        written = foreign.write_tokamax(options.file, filter(wanted, cache), names)
    else:
        written = exchange.export_records(cache, options.file, select=wanted)
    output.document({"file": str(options.file), "format": options.format, "written": written})
    output.line(f"{written} records written to {options.file}")
    return True


def _import(options: argparse.Namespace, output: Output) -> bool:
    from tpu_kernels.tuning import exchange

    cache = _open().tuned
    if options.format == "tables":
        raise ArgumentError(
            "tables are read by the package itself", hint="export them to tpu_kernels/tuning/tables"
        )
    if options.format == "own":
        result = exchange.import_records(cache, options.file, overwrite=options.overwrite)
        output.document({"file": str(options.file), **vars(result)})
        output.line(
            f"{result.written} records imported, {result.kept} were there already, "
            f"{result.damaged} damaged"
        )
        return result.written + result.kept > 0
    return _import_foreign(options, output)


def _import_foreign(options: argparse.Namespace, output: Output) -> bool:
    from tpu_kernels.tuning import adoption, foreign

    if options.kernel is None or options.target is None:
        raise ArgumentError(
            f"results of {options.format} are for a kernel and a chip that its files do not name "
            "in our terms",
            hint="tpu-kernels cache import FILE KERNEL --target v6e --format " + options.format,
        )
    kernel = find_kernel(options.kernel, options.imports)
    rename = dict(_pair(word) for word in options.rename)
    cache, origin = _open().tuned, f"{options.format}: {options.file.name}"
    if options.format == "tokamax":
        results = foreign.read_tokamax(options.file)
        done = adoption.adopt(kernel, results, options.target, cache, rename=rename, origin=origin)
    else:
        config = {rename.get(k, k): v for k, v in foreign.read_helion(options.file).items()}
        call = call_arguments(options.arguments, empty_tensor)
        adoption.store_config(kernel, call, config, options.target, cache, origin=origin)
        done = adoption.Adopted(1, ())
    output.document(
        {"file": str(options.file), "written": done.written, "refused": list(done.refused)}
    )
    output.line(f"{done.written} records imported, {len(done.refused)} do not fit {kernel.name}")
    for reason in sorted(set(done.refused)):
        output.line(f"  {reason}")
    return done.written > 0


def _prune(options: argparse.Namespace, output: Output) -> bool:
    limit = None if options.max_mib is None else int(options.max_mib * _MIB)
    deleted = _open().prune(
        options.store or _all(), max_bytes=limit, unused_days=options.unused_days
    )
    output.document({"deleted": deleted})
    output.line(", ".join(f"{name}: {count} files deleted" for name, count in deleted.items()))
    return True


def _verify(options: argparse.Namespace, output: Output) -> bool:
    stores = _open()
    problems = stores.verify(options.store or _all())
    output.document(
        {"ok": not problems, "problems": {str(path): why for path, why in problems.items()}}
    )
    for path, why in problems.items():
        output.line(f"{path}: {why}")
    bad = f"{len(problems)} damaged files; `tpu-kernels cache prune` deletes them"
    output.line(bad if problems else f"nothing damaged in {stores.folder}")
    return not problems


def _open() -> Stores:
    from tpu_kernels.tuning.stores import Stores

    return Stores()


def _all() -> tuple[str, ...]:
    from tpu_kernels.tuning.stores import STORES

    return STORES


def _add_store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        action="append",
        choices=("tuned", "programs", "compiled"),
        help="only this store; repeat for several",
    )


def _add_target_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="v6e", metavar="CHIP[,CHIP...]")


def _add_format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=FORMATS, default="own", help="form of the file (default: %(default)s)"
    )


def _pair(word: str) -> tuple[str, str]:
    theirs, equals, ours = word.partition("=")
    if not (theirs and equals and ours):
        raise ArgumentError(f"--rename {word!r} is not THEIRS=OURS")
    return theirs, ours


def _day(seconds: float, *, full: bool = False) -> str:
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return when.isoformat(timespec="seconds") if full else when.date().isoformat()
