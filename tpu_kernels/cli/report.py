"""``tpu-kernels report``: a page of pictures of a kernel on several TPUs."""

from __future__ import annotations

import argparse
from pathlib import Path

from tpu_kernels.cli.argspec import empty_tensor, parse_config
from tpu_kernels.cli.arguments import (
    add_call_arguments,
    add_compile_options,
    call_arguments,
    targets,
)
from tpu_kernels.cli.kernels import add_import_option, find_kernel
from tpu_kernels.cli.output import Output

DESCRIPTION = """\
Compile one call of a kernel for several generations and draw it: one HTML page that needs nothing
else, with --png image files too. Exit code 1 if the kernel does not compile for one of them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments and options of the subcommand."""
    add_call_arguments(parser)
    parser.add_argument(
        "--target",
        default="v5e,v5p,v6e,tpu7x",
        metavar="CHIP[,CHIP...]",
        help="TPU generations: v4, v5e, v5p, v6e, tpu7x (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="page to write (default: %(default)s)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="write the charts as PNG files too (matplotlib)"
    )
    parser.add_argument("--title", help="title of the page (default: the kernel's name)")
    add_compile_options(parser)
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Compile, write the page, print where it is; False if some target refuses."""
    from tpu_kernels.cli.compile import require_a_verdict
    from tpu_kernels.verify.pictures import report

    kernel = find_kernel(options.kernel, options.imports)
    args, kwargs = call_arguments(options.arguments, empty_tensor)
    page = report(
        kernel,
        args,
        targets(options.target),
        path=options.out,
        png=options.png,
        title=options.title,
        config=parse_config(options.config) or None,
        timeout_s=options.timeout_s,
        cache=not options.no_cache,
        **kwargs,
    )
    for reports in page.reports.values():
        require_a_verdict(reports)
    output.document(
        {
            "ok": page.ok,
            "page": str(page.path),
            "images": [str(image) for image in page.images],
            "reports": {name: reports.to_dict() for name, reports in page.reports.items()},
        }
    )
    output.line(str(page))
    return page.ok
