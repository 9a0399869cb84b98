// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var coreV1 = schema.GroupVersion{Version: "v1"}

// node has the fields of a Node that are read here; k8s.io/api would bring the code of all
// kinds.
type node struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Status nodeStatus `json:"status"`
}

type nodeStatus struct {
	NodeInfo nodeInfo `json:"nodeInfo"`
}

type nodeInfo struct {
	BootID string `json:"bootID"`
}

// DeepCopyObject implements runtime.Object, as that of NodeInventory.
func (n *node) DeepCopyObject() runtime.Object { c := *n; return &c }

type nodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []node `json:"items"`
}

// DeepCopyObject implements runtime.Object, as that of NodeInventory.
func (l *nodeList) DeepCopyObject() runtime.Object { c := *l; return &c }

// newScheme returns a scheme with all objects of this package.
func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	s.AddKnownTypes(groupVersion, &NodeInventory{}, &NodeInventoryList{})
	s.AddKnownTypeWithName(coreV1.WithKind("Node"), &node{})
	s.AddKnownTypeWithName(coreV1.WithKind("NodeList"), &nodeList{})
	s.AddKnownTypes(coreV1, &metav1.Status{}, &metav1.APIGroup{})
	metav1.AddToGroupVersion(s, groupVersion)
	metav1.AddToGroupVersion(s, coreV1)
	return s
}
