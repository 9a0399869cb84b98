// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"regexp"
	"time"
)

// Cluster configures the inventory of this node in the Kubernetes API.
type Cluster struct {
	Inventory bool          `key:"inventory" flag:"cluster-inventory" kind:"bool" help:"write what is open on this node to an object in the Kubernetes API, at the server of kube.kubeconfigs"`
	NodeName  string        `key:"nodeName" flag:"cluster-node-name" kind:"name" is:"node" help:"name of this machine's Node object (default its host name)"`
	Interval  time.Duration `key:"interval" flag:"cluster-interval" kind:"duration" min:"1s" max:"1h" help:"least time between two writes of changes"`
	Policy    string        `key:"policy" flag:"cluster-policy" kind:"file" is:"file" help:"file with a policy as that of \"fairlead ls --cluster --violations\", for metrics of what this node violates; needs cluster.inventory"`
}

func (c Cluster) validate() (key string, err error) {
	if c.Policy != "" && !c.Inventory {
		return "cluster.policy", fmt.Errorf("%q: a policy is about the inventory: want cluster.inventory: true with it", c.Policy)
	}
	return "", nil
}

// nodeNames are the names that an object in the API can have, of at most maxDNSName bytes.
var nodeNames = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// maxDNSName is the longest name in the DNS, in bytes. Regular expressions do not count
// so far: they would take 200 KB each.
const maxDNSName = 253

func nodeName(s string) (string, error) {
	if s != "" && (len(s) > maxDNSName || !nodeNames.MatchString(s)) {
		return "", fmt.Errorf("%q: want the name of a Node, of lower-case letters, digits, dots and dashes", s)
	}
	return s, nil
}
