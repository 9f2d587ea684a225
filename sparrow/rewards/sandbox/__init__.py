"""Judge untrusted programs by running tests in a sandbox. The sandbox limits the programs' access,
resources and output.
"""

from sparrow.rewards.sandbox.box import Isolation, Sandbox, choose_isolation
from sparrow.rewards.sandbox.child import Child, ChildEndedError, ChildTimeoutError
from sparrow.rewards.sandbox.inside.clock import STARVED, OwnTime
from sparrow.rewards.sandbox.inside.wire import pack, unpack
from sparrow.rewards.sandbox.judge import Judge, Judgement, Tests
from sparrow.rewards.sandbox.limits import Limits
from sparrow.rewards.sandbox.walls import Held
