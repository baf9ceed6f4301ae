"""The verbs of the command line: what each does, and where."""

VERBS = {
    "plan": ("launcher.plan.cli", "predict what fits, how close and how fast, without a GPU"),
    "train": ("launcher.train", "train in this process: one GPU, or the CPU"),
    "run": ("launcher.torchrun", "start ranks: takes torchrun's own arguments"),
    "sweep": ("launcher.compare.sweep.cli", "train every cell of a grid, one after the other"),
    "report": ("launcher.compare.report.cli", "compare runs: a table, a page, CSV, Markdown, JSON"),
    "matrix": (
        "launcher.compare.sweep.matrix",
        "which techniques go with which strategies, and why not",
    ),
    "export": ("launcher.exchange.export", "write a checkpoint as a GPT-2 of transformers"),
    "import": ("launcher.exchange.import_", "start from a GPT-2 of transformers"),
    "submit": ("launcher.submit", "check a training run and hand it to Slurm"),
    "profile": ("launcher.plan.profile", "measure this machine for the planner"),
    "completion": ("launcher.completion", "print a script that completes all this in a shell"),
    "doctor": ("launcher.doctor", "check this machine and say what will not work"),
}
