"""TensorFlow, here a stand-in, sees no accelerator whenever it is imported."""

import subprocess
import sys
import textwrap

FAKE = """
import os, types
os.write(2, b"a notice from below\\n")
HIDDEN = []
config = types.SimpleNamespace(
    set_visible_devices=lambda devices, kind: HIDDEN.append((devices, kind))
)
if os.environ.get("BROKEN"):
    raise ImportError("broken")
"""


def run(tmp_path, code, **environment):
    (tmp_path / "tensorflow.py").write_text(FAKE)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), **environment},
        capture_output=True,
        text=True,
    )


def test_imported_later(tmp_path):
    done = run(
        tmp_path,
        """
        from speculative.runs.launch.tensorflow_guard import hide_accelerators_from_tensorflow
        hide_accelerators_from_tensorflow()
        hide_accelerators_from_tensorflow()
        import tensorflow
        print(tensorflow.HIDDEN, tensorflow.__spec__.name)
        """,
    )
    assert done.stdout == "[([], 'GPU'), ([], 'TPU')] tensorflow\n", done.stderr
    assert done.stderr == ""


def test_imported_before(tmp_path):
    done = run(
        tmp_path,
        """
        import tensorflow
        from speculative.runs.launch.tensorflow_guard import hide_accelerators_from_tensorflow
        hide_accelerators_from_tensorflow()
        print(tensorflow.HIDDEN)
        """,
    )
    assert done.stdout == "[([], 'GPU'), ([], 'TPU')]\n", done.stderr


def test_what_a_broken_one_said_is_told(tmp_path):
    done = run(
        tmp_path,
        """
        from speculative.runs.launch.tensorflow_guard import hide_accelerators_from_tensorflow
        hide_accelerators_from_tensorflow()
        import tensorflow
        """,
        BROKEN="1",
    )
    assert done.returncode == 1
    assert "a notice from below" in done.stderr and "ImportError: broken" in done.stderr
