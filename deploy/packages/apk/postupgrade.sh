#!/bin/sh
if rc-service fairlead-agent status >/dev/null 2>&1; then
	rc-service fairlead-agent restart
fi
