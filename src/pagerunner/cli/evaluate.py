"""`pagerunner eval`: exact-match accuracy per task."""

from __future__ import annotations

import argparse

from pagerunner.cli.options import ADAPTERS, Parser, add_common_options, add_engine_options, positive
from pagerunner.cli.session import open_llm, resolve_model, show_progress
from pagerunner.eval.runner import evaluate
from pagerunner.eval.tasks import TASKS


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner eval", "Score a model on recall, addition, sorting and sentences, decoded greedily.")
    parser.add_argument("--model", help="model directory, hub name or a demo's (default: demo)")
    parser.add_argument(
        "--tasks", default=",".join(TASKS), metavar="NAMES", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--num-examples", type=positive, default=50, metavar="N", help="per task (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_options(parser, without=ADAPTERS | {"served_model_name", "kv_cache_metrics_sample"})
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Evaluate and print the table."""
    args, demo = resolve_model(namespace)
    llm = open_llm(args, use_tqdm=show_progress(namespace))
    report = evaluate(
        llm,
        tasks=[name.strip() for name in namespace.tasks.split(",") if name.strip()],
        count=namespace.num_examples,
        seed=args.seed,
        as_chat=demo is None,
        use_tqdm=show_progress(namespace),
        model=demo or args.model,
    )
    print(report.as_json() if namespace.json else report.text())
    return 0
