"""``python -m tests.fake_cuda [COMMAND …]`` runs a command on the fake device.

Without a command it prints the directory of the device's libraries.
"""

import os
import sys

from . import build, environment, why_not

if reason := why_not():
    sys.exit(reason)
if sys.argv[1:]:
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment()})
print(build())
