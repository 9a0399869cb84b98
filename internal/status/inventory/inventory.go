// SPDX-License-Identifier: Apache-2.0

// Package inventory keeps an object in the Kubernetes API for each node: which ports are
// open there, who owns them and since when. The agent of the node writes it, and
// `fairlead ls --cluster` reads it.
//
// An object has a few structured fields, which are useful in kubectl, and the whole list
// compressed in one field: the API server's cost of a write is that of its structured
// entries.
package inventory

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The resource, as deploy/kubernetes/crd.yaml defines it.
const (
	Group    = "fairlead.dev"
	Version  = "v1alpha1"
	Kind     = "NodeInventory"
	Resource = "nodeinventories"
)

var groupVersion = schema.GroupVersion{Group: Group, Version: Version}

// NodeInventory is the object of one node, whose name it has. There is no status
// subresource, so that one request writes all of it.
type NodeInventory struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Status Status `json:"status"`
}

// DeepCopyObject implements runtime.Object. The copy shares what it points to, as nobody
// here changes an object in place.
func (n *NodeInventory) DeepCopyObject() runtime.Object { c := *n; return &c }

// NodeInventoryList is a list of these.
type NodeInventoryList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []NodeInventory `json:"items"`
}

// DeepCopyObject implements runtime.Object, as that of NodeInventory.
func (l *NodeInventoryList) DeepCopyObject() runtime.Object { c := *l; return &c }

// Status is what an agent reports. Names of owners come from the node and are not trusted.
type Status struct {
	Agent   string      `json:"agent"`   // its version
	Holder  Holder      `json:"holder"`  // who writes the object
	Updated metav1.Time `json:"updated"` // when the content last changed, by the node's clock
	Hash    string      `json:"hash"`    // of the content; it is not written again while this is equal
	Ports   Counts      `json:"ports"`
	// Wide are the first of the ports that are open wider than loopback, by number.
	Wide        []WidePort         `json:"wide,omitempty"`
	WideOmitted int                `json:"wideOmitted,omitempty"` // how many more there are
	Conditions  []metav1.Condition `json:"conditions,omitempty"`
	// List is a JSON array of Port, compressed by gzip; see Decode.
	List        []byte `json:"list,omitempty"`
	ListOmitted int    `json:"listOmitted,omitempty"` // ports that are not in List, for its size
}

// Holder identifies the agent that writes an object: all agents of one network namespace
// of one boot of a machine are one holder, of which a lock lets one write.
type Holder struct {
	Machine   string      `json:"machine"`   // the boot id
	Namespace string      `json:"namespace"` // the network namespace's inode
	Renewed   metav1.Time `json:"renewed"`   // when it last wrote, by the node's clock
}

func (h Holder) same(o Holder) bool { return h.Machine == o.Machine && h.Namespace == o.Namespace }

// Counts counts ports.
type Counts struct {
	Total    int `json:"total"`
	Wide     int `json:"wide"` // open wider than loopback, whatever their state
	Active   int `json:"active"`
	Pending  int `json:"pending"`
	Conflict int `json:"conflict"`
	Failed   int `json:"failed"`
	Denied   int `json:"denied"`
}

// WidePort is a port that is open wider than loopback.
type WidePort struct {
	Protocol string `json:"protocol"`
	Address  string `json:"address"`
	Port     int    `json:"port"`
	Owner    string `json:"owner,omitempty"` // "container default/web", "process sshd"
}

// The types of conditions.
const (
	// ConditionReady is true while each source is live, so that the list is complete.
	ConditionReady = "Ready"
	// ConditionHealthy is true while no check of `fairlead doctor` fails.
	ConditionHealthy = "Healthy"
	// ConditionCompliant is true while no port violates the policy of the agent, and false also
	// while that cannot be judged. It is there only if the agent has a policy.
	ConditionCompliant = "Compliant"
)

// Times of the protocol between the agents of one node, and their readers.
const (
	// RenewEvery is how often a holder writes its object though nothing has changed.
	RenewEvery = 5 * time.Minute
	// HeldFor is how long an object belongs to a holder that does not renew it.
	HeldFor = 3 * RenewEvery
)
