#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a stage of the tests, or a part of one, and keeps its output and its events
# (those of go test -json) in ${RESULTS:-bin/results} as NAME.log and NAME.json, where
# test/sum finds them. The name of a part is STAGE.PART.
#
#   hack/stage.sh test NAME COMMAND...    COMMAND prints the events of go test -json
#   hack/stage.sh check NAME COMMAND...   any other command: one check; if it succeeds, only its lines that begin with "note: " are shown
#
# FORMAT is the format of gotestsum; a line per package by default.
set -euo pipefail
usage() { sed -n '7,8s/^# *//p' "$0" >&2; exit 2; }
[ $# -ge 3 ] || usage
kind=$1 name=$2
shift 2
cache=${FAIRLEAD_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/fairlead}
results=${RESULTS:-$(dirname "$0")/../bin/results}
mkdir -p "$results"
log=$results/$name.log json=$results/$name.json

case $kind in
test)
	[ -x "$cache/bin/gotestsum" ] || "$(dirname "$0")/provision.sh" gotestsum >&2
	"$cache/bin/gotestsum" --format "${FORMAT:-pkgname}" --format-hide-empty-pkg --format-icons text \
		--jsonfile "$json" --raw-command -- "$@" 2>&1 | tee "$log"
	;;
check)
	start=$SECONDS action=pass word=ok
	"$@" >"$log" 2>&1 </dev/null || action=fail word=FAIL
	if [ $action = pass ]; then grep '^note: ' "$log" || true; else cat "$log"; fi
	printf '%-4s  %s (%ds)\n' $word "$name" $((SECONDS - start))
	printf '{"Action":"%s","Package":"check","Test":"%s","Elapsed":%d}\n{"Action":"%s","Package":"check"}\n' \
		$action "$name" $((SECONDS - start)) $action >"$json"
	[ $action = pass ]
	;;
*) usage ;;
esac
