"""Say the addresses of the cluster that all ranks form, as JSON."""

import json

from reporting import say

import mpistrat
from mpistrat.cluster import form

mpistrat.init()
say(json.dumps(form({"chief": 1, "worker": mpistrat.size() - 2, "ps": 1}).spec))
