// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"regexp"
	"strconv"
	"time"
)

// Cluster configures the inventory of this node in the Kubernetes API.
type Cluster struct {
	Inventory bool
	NodeName  string        // of the Node object; empty means the machine's host name
	Interval  time.Duration // least time between two writes of changes, 1s to 1h
	Policy    string        // file that says which ports may be open wider than loopback; empty for none
}

func (c *Agent) clusterFields() []field {
	return []field{
		one("cluster.inventory", "cluster-inventory", boolKind, &c.Cluster.Inventory, truth, strconv.FormatBool,
			"write what is open on this node to an object in the Kubernetes API, at the server of kube.kubeconfigs"),
		one("cluster.nodeName", "cluster-node-name", "name", &c.Cluster.NodeName, nodeName, str,
			"name of this machine's Node object (default its host name)"),
		one("cluster.interval", "cluster-interval", "duration", &c.Cluster.Interval, duration(time.Second, time.Hour, false), stringOf,
			"least time between two writes of changes"),
		one("cluster.policy", "cluster-policy", "file", &c.Cluster.Policy, filePath(true), str,
			"file with a policy as that of \"fairlead ls --cluster --violations\", for metrics of what this node violates; needs cluster.inventory"),
	}
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
