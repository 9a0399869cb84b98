// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// object is one of the API.
type object map[string]any

// clusterOf starts an API server with a node "n" and its inventory, unless that is nil, and
// returns a kubeconfig for it.
func clusterOf(t *testing.T, written object) (kubeconfig string) {
	t.Helper()
	items := []object{}
	if written != nil {
		items = append(items, written)
	}
	mux := http.NewServeMux()
	answer := func(path string, v any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(v)
		})
	}
	answer("/api/v1/nodes", object{"kind": "NodeList", "apiVersion": "v1", "items": []object{{"metadata": object{"name": "n"}}}})
	answer("/apis/fairlead.dev/v1alpha1/nodeinventories", object{"kind": "NodeInventoryList", "apiVersion": "fairlead.dev/v1alpha1", "items": items})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c","clusters":[{"name":"c","cluster":{"server":%q}}],`+
		`"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}]}`, server.URL)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

// inventoryOf is what the agent of node "n" wrote: that port 22 of an owner is open.
func inventoryOf(t *testing.T, owner, ready string, age time.Duration) object {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	err := json.NewEncoder(z).Encode([]object{{
		"protocol": "tcp", "address": "0.0.0.0", "port": 22, "state": "active", "owner": object{"kind": "process", "name": owner},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return object{"metadata": object{"name": "n"}, "status": object{
		"list": b.Bytes(), "ports": object{"total": 1, "wide": 1, "active": 1},
		"holder":     object{"renewed": time.Now().Add(-age).UTC().Format(time.RFC3339)},
		"conditions": []object{{"type": "Ready", "status": ready, "message": "source nat is stale"}},
	}}
}

func TestAuditExitStatus(t *testing.T) {
	const allowed = "rules: [{match: {ports: 22}, action: allow}]"
	good := inventoryOf(t, "sshd", "True", 0)
	for _, c := range []struct {
		flags []string
		warns string
	}{
		{nil, "policy 1 is for no node"}, {[]string{"-o", "json"}, `"warnings":[`}, {[]string{"--node", "n"}, ""}, {[]string{"--node", "n", "-o", "json"}, ""},
	} {
		policy := filepath.Join(t.TempDir(), "policy.yaml")
		if err := os.WriteFile(policy, []byte("policies: [{nodes: {labels: {rol: edge}}, rules: []}]\n"+allowed), 0o600); err != nil {
			t.Fatal(err)
		}
		stdout, stderr, code := execute(t, append([]string{"ls", "--cluster", "--violations", "-f", policy, "--kubeconfig", clusterOf(t, good)}, c.flags...)...)
		if code != exitOK || !strings.Contains(stdout, c.warns) || strings.Contains(stdout, "is for no node") != (c.warns != "") {
			t.Errorf("%q: status %d, want a warning with %q:\n%s\n%s", c.flags, code, c.warns, stdout, stderr)
		}
	}
	for name, c := range map[string]struct {
		written object
		policy  string
		code    int
		want    string
	}{
		"complies":               {good, allowed, exitOK, "No violations: 1 nodes, 1 ports"},
		"violation":              {good, "rules: []", exitError, "no rule allows it"},
		"no inventory":           {nil, allowed, exitError, "node n is not audited: no inventory"},
		"out of date":            {inventoryOf(t, "sshd", "True", time.Hour), allowed, exitError, "node n is not audited: last written 60m ago"},
		"not complete":           {inventoryOf(t, "sshd", "False", 0), allowed, exitError, "node n is not audited: its list may lack ports"},
		"a policy with mistakes": {good, "rules: {}", exitUsage, "policy.yaml:1"},
		"characters for a terminal": {
			inventoryOf(t, "\x1b]0;x\a\x1b[2J", "True", 0), "rules: []", exitError, `\x1b]0;x\a\x1b[2J`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			policy := filepath.Join(t.TempDir(), "policy.yaml")
			if err := os.WriteFile(policy, []byte(c.policy), 0o600); err != nil {
				t.Fatal(err)
			}
			stdout, stderr, code := execute(t, "ls", "--cluster", "--violations", "-f", policy, "--kubeconfig", clusterOf(t, c.written))
			if code != c.code || !strings.Contains(stdout+stderr, c.want) || strings.Contains(stdout+stderr, "\x1b") {
				t.Errorf("status %d, want %d and %q:\n%q\n%q", code, c.code, c.want, stdout, stderr)
			}
		})
	}
}

func TestViolationsNeedAPolicy(t *testing.T) {
	for args, want := range map[string]string{
		"ls --violations -f p.yaml":                      "--violations: only with --cluster",
		"ls --cluster --violations":                      "--violations: want -f POLICY with it",
		"ls --cluster -f p.yaml":                         "--file: only with --violations",
		"ls -f p.yaml":                                   "--file: only with --violations",
		"ls --cluster --violations --filter x -f p.yaml": "--filter: not with --violations",
		"ls --names --cluster":                           "--cluster: not with --names",
	} {
		if _, stderr, code := execute(t, strings.Fields(args)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %q, want %q", args, code, stderr, want)
		}
	}
}
