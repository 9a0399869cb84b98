// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// Containers that are nodes of a cluster are recognised by the labels that their tools give them.
func TestOwnerThatIsANode(t *testing.T) {
	for _, tt := range []struct {
		name, label, value, want string
	}{
		{"dev-control-plane", "io.x-k8s.kind.cluster", "dev", "container dev-control-plane (1), of the kind cluster dev"},
		{"k3d-dev-serverlb", "k3d.cluster", "dev", "container k3d-dev-serverlb (1), of the k3d cluster dev"},
		{"minikube", "name.minikube.sigs.k8s.io", "minikube", "container minikube (1), of the minikube cluster minikube"},
		{"web", "k3d.cluster", "", "container web (1)"},
		{"web", "app", "k3d", "container web (1)"},
	} {
		o := port.Owner{Kind: port.OwnerContainer, ID: "1", Name: tt.name, Labels: map[string]string{tt.label: tt.value}}
		if got := Owner(o); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.label, got, tt.want)
		}
	}
	pod := port.Owner{Kind: port.OwnerContainer, ID: "default/web-0", Name: "web-0", Namespace: "default", Cluster: "k3s"}
	if got, want := Owner(pod), "container web-0 (default/web-0) of default, in cluster k3s"; got != want {
		t.Errorf("a pod: %q, want %q", got, want)
	}
	process := port.Owner{Kind: port.OwnerProcess, ID: "1", Name: "web", Labels: map[string]string{"k3d.cluster": "dev"}}
	if got := Owner(process); got != "process web (1)" {
		t.Errorf("a process: %q", got)
	}
}
