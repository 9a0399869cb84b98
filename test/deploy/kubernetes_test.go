// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/config/privilege"
)

const (
	daemonSet  = "../../deploy/kubernetes/daemonset.yaml"
	nodeConfig = "../../deploy/kubernetes/agent.yaml"

	kustomization = "../../deploy/kubernetes/kustomization.yaml"
)

// The pod has the capabilities of the agent's table, but for the one for ports below 1024:
// it opens none.
func TestPodsCapabilitiesAreThoseOfTheTable(t *testing.T) {
	var d struct {
		Spec struct {
			Template struct {
				Spec struct {
					Containers []struct {
						SecurityContext struct {
							Capabilities struct{ Add, Drop []string }
						}
					}
				}
			}
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, daemonSet)), &d); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, n := range privilege.Agent() {
		if name := strings.TrimPrefix(n.Name, "CAP_"); n.Unit() && name != "NET_BIND_SERVICE" {
			want = append(want, name)
		}
	}
	got := d.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities
	slices.Sort(want)
	slices.Sort(got.Add)
	if !slices.Equal(got.Add, want) || !slices.Equal(got.Drop, []string{"ALL"}) {
		t.Errorf("the pod adds %q and drops %q, want %q and ALL", got.Add, got.Drop, want)
	}
}

func TestPodsConfigurationIsValid(t *testing.T) {
	if out, err := exec.Command(build(t), "config", "check", nodeConfig).CombinedOutput(); err != nil {
		t.Errorf("config check: %v: %s", err, out)
	}
}

// Who applies the folder gets each of its files.
func TestKustomizationIsComplete(t *testing.T) {
	var k struct {
		Resources          []string
		ConfigMapGenerator []struct{ Files []string }
	}
	if err := yaml.Unmarshal([]byte(read(t, kustomization)), &k); err != nil {
		t.Fatal(err)
	}
	want := append(k.Resources, filepath.Base(kustomization))
	for _, g := range k.ConfigMapGenerator {
		want = append(want, g.Files...)
	}
	entries, err := os.ReadDir(filepath.Dir(kustomization))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the folder has %q, the kustomization %q", got, want)
	}
}

// The agent's account reads what names ports, no secret and no workload, and writes
// inventories only.
func TestAccountHasFewRights(t *testing.T) {
	want := []string{
		" services list", " services watch", "discovery.k8s.io endpointslices list", "discovery.k8s.io endpointslices watch",
		"fairlead.dev nodeinventories get", "fairlead.dev nodeinventories create", "fairlead.dev nodeinventories update", " nodes get",
	}
	var got []string
	for document := range strings.SplitSeq(read(t, "../../deploy/kubernetes/rbac.yaml"), "\n---\n") {
		var role struct {
			Rules []struct{ APIGroups, Resources, Verbs []string }
		}
		if err := yaml.Unmarshal([]byte(document), &role); err != nil {
			t.Fatal(err)
		}
		for _, r := range role.Rules {
			for _, group := range r.APIGroups {
				for _, resource := range r.Resources {
					for _, verb := range r.Verbs {
						got = append(got, group+" "+resource+" "+verb)
					}
				}
			}
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the account has %q, want %q", got, want)
	}
}
