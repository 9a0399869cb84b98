// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package cluster

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/inventory"
	"github.com/fairlead/fairlead/test/kit/program"
)

// spare is a Node without a kubelet, which nobody makes anew but the test.
const spare = "spare"

// The garbage collector removes the inventory of a Node that is deleted. When the Node is
// made again the agent, which ran on, writes an inventory that belongs to the new one; none
// is left when that is gone as well.
func TestNodeIsMadeAgain(t *testing.T) {
	// A DaemonSet would have a pod on the spare Node, for ever pending.
	kubectl(t, "-n", "fairlead", "delete", "daemonset", "fairlead", "--ignore-not-found")
	kubectl(t, "apply", "-f", "../../deploy/kubernetes/crd.yaml")
	first := makeSpare(t)
	control := filepath.Join(t.TempDir(), "s")
	agent := program.Start(t, program.Command{Cmd: exec.Command(os.Getenv(program.Variable), "agent", "--sink", "none", "--source", "socket",
		"--control", control, "--kubeconfig", node.Kubeconfig,
		"--cluster-inventory", "--cluster-node-name", spare, "--cluster-interval", "1s")})
	before := inventoryOf(t, first)

	deleteSpare(t)
	opened := listen(t)
	says(t, control, "set cluster.nodeName")
	gone(t) // the agent has nobody whose object it would write

	second := makeSpare(t)
	after := inventoryOf(t, second)
	if first == second || before.UID == after.UID {
		t.Errorf("the object %s of Node %s became %s of %s, want another one of another", before.UID, first, after.UID, second)
	}
	eventually(t, "the new port in the list", func() error {
		l, err := list("--cluster", "--node", spare)
		if err == nil && !slices.ContainsFunc(l.Publications, func(p status.Publication) bool { return p.Key.Port == opened }) {
			err = fmt.Errorf("%v, want port %d", l.Publications, opened)
		}
		return err
	})
	says(t, control, "")

	agent.Kill()
	deleteSpare(t)
	gone(t)
}

// makeSpare makes the Node, with the boot id of this machine, and returns its uid.
func makeSpare(t *testing.T) (uid string) {
	t.Helper()
	boot, _, err := inventory.ThisMachine()
	if err != nil {
		t.Fatal(err)
	}
	if err := node.CreateNode(t.Context(), spare, boot); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = tryKubectl("delete", "node", spare, "--ignore-not-found") })
	return kubectl(t, "get", "node", spare, "-o", "jsonpath={.metadata.uid}")
}

func deleteSpare(t *testing.T) { kubectl(t, "delete", "node", spare) }

// inventoryOf waits for the object of the spare Node that belongs to the one with a uid.
func inventoryOf(t *testing.T, owner string) (o inventory.NodeInventory) {
	t.Helper()
	eventually(t, "the inventory of "+spare, func() error {
		out, err := tryKubectl("get", "nodeinventory", spare, "-o", "json")
		if err != nil {
			return err
		}
		o = inventory.NodeInventory{}
		if err := json.Unmarshal([]byte(out), &o); err != nil {
			return err
		}
		if r := o.OwnerReferences; len(r) != 1 || string(r[0].UID) != owner || o.DeletionTimestamp != nil {
			return fmt.Errorf("owners %+v, deleted %v; want %s", r, o.DeletionTimestamp, owner)
		}
		return nil
	})
	return o
}

// gone waits until no inventory is of the spare Node.
func gone(t *testing.T) {
	t.Helper()
	eventually(t, "no inventory of "+spare, func() error {
		out, err := tryKubectl("get", "nodeinventory", spare, "--ignore-not-found", "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
}

// says waits until the agent with that control socket says why it cannot write its object;
// that it can if the reason is empty.
func says(t *testing.T, control, reason string) {
	t.Helper()
	eventually(t, "what the agent says", func() error {
		a, err := status.NewClient(control).Examine(t.Context())
		switch {
		case err != nil:
			return err
		case a.Inventory == nil, (a.Inventory.Error == "") != (reason == ""), !strings.Contains(a.Inventory.Error, reason):
			return fmt.Errorf("inventory %+v, want error %q", a.Inventory, reason)
		}
		return nil
	})
}

// listen opens a port of the node until the test ends.
func listen(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}
