#!/bin/sh
rc-service --ifstarted fairlead-agent stop
rc-update --all delete fairlead-agent 2>/dev/null || :
