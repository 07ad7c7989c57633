"""Say what this rank sees of the hosts, as JSON."""

import json
import platform

from reporting import say

import mpistrat

mpistrat.init()
say(json.dumps({
    "name": platform.node(), "hosts": mpistrat.hosts(), "size": mpistrat.size(),
    "local": [mpistrat.local_rank(), mpistrat.local_size()], "cross": [mpistrat.cross_rank(), mpistrat.cross_size()],
    "is_homogeneous": mpistrat.is_homogeneous(), "role": mpistrat.role(),
    "cluster_spec": mpistrat.cluster_spec([7000 + rank for rank in range(mpistrat.size())])}))
