"""Does every verb called from Python answer a value of the wrong type with an error of kvlens' own?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_a_value_of_the_wrong_type_is_refused_in_words(tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    command = [sys.executable, str(HERE / "wrong_types.py"), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    control = [line for line in found["raw"] if line.startswith("control")]
    assert len(control) == 12  # the probe sees a raw error, for every value
    assert [line for line in found["raw"] if line not in control] == []
    assert found["refused"] > 500
