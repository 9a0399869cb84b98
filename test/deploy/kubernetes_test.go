// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package deploy

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/privilege"
)

const (
	daemonSet  = "../../deploy/kubernetes/daemonset.yaml"
	nodeConfig = "../../deploy/kubernetes/agent.yaml"
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
