// SPDX-License-Identifier: Apache-2.0

// Package object has the fields of Services and EndpointSlices that fairlead reads.
//
// k8s.io/api has them as well, with the code of all other kinds: 4 MB of a program, which
// the linker cannot leave out.
package object

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The groups of the objects.
var (
	CoreV1      = schema.GroupVersion{Version: "v1"}
	DiscoveryV1 = schema.GroupVersion{Group: "discovery.k8s.io", Version: "v1"}
)

// Values of the fields.
const (
	NodePort     = "NodePort"
	LoadBalancer = "LoadBalancer"
	ExternalName = "ExternalName"
	// NoClusterIP is the cluster IP of a headless Service.
	NoClusterIP = "None"
	IPv4        = "IPv4"
	// FQDN is an address type.
	FQDN = "FQDN"
	// LabelService is the label of an EndpointSlice that names its Service.
	LabelService = "kubernetes.io/service-name"
)

// Register makes the objects known to a scheme.
func Register(s *runtime.Scheme) {
	s.AddKnownTypes(CoreV1, &Service{}, &ServiceList{}, &metav1.Status{})
	s.AddKnownTypes(DiscoveryV1, &EndpointSlice{}, &EndpointSliceList{})
	metav1.AddToGroupVersion(s, CoreV1)
	metav1.AddToGroupVersion(s, DiscoveryV1)
}

// Service is a Service of core/v1. Of its metadata, protobuf sets the name, namespace,
// resource version and labels.
type Service struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec   ServiceSpec   `json:"spec"`
	Status ServiceStatus `json:"status"`
}

// ServiceSpec is what a Service asks for.
type ServiceSpec struct {
	Ports                    []ServicePort `json:"ports"`
	ClusterIP                string        `json:"clusterIP"`
	ClusterIPs               []string      `json:"clusterIPs"`
	Type                     string        `json:"type"`
	ExternalIPs              []string      `json:"externalIPs"`
	LoadBalancerSourceRanges []string      `json:"loadBalancerSourceRanges"`
	IPFamilies               []string      `json:"ipFamilies"`
}

// ServicePort is a port of a Service.
type ServicePort struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Port     int32  `json:"port"`
	NodePort int32  `json:"nodePort"`
}

// ServiceStatus is what a Service has.
type ServiceStatus struct {
	LoadBalancer LoadBalancerStatus `json:"loadBalancer"`
}

// LoadBalancerStatus is where a load balancer is reached.
type LoadBalancerStatus struct {
	Ingress []Ingress `json:"ingress"`
}

// Ingress is an address of a load balancer. One with a name only has no IP.
type Ingress struct {
	IP string `json:"ip"`
}

// ServiceList is a page of Services.
type ServiceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []Service `json:"items"`
}

// EndpointSlice is an EndpointSlice of discovery.k8s.io/v1. Its metadata is as that of a
// Service.
type EndpointSlice struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	AddressType string         `json:"addressType"`
	Endpoints   []Endpoint     `json:"endpoints"`
	Ports       []EndpointPort `json:"ports"`
}

// Endpoint serves a Service.
type Endpoint struct {
	Addresses  []string   `json:"addresses"`
	Conditions Conditions `json:"conditions"`
	TargetRef  *Reference `json:"targetRef"`
}

// Conditions of an endpoint; nil is not known.
type Conditions struct {
	Ready   *bool `json:"ready"`
	Serving *bool `json:"serving"`
}

// Reference names another object.
type Reference struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// EndpointPort is a port at which all endpoints of a slice serve.
type EndpointPort struct {
	Name     *string `json:"name"`
	Protocol *string `json:"protocol"`
	Port     *int32  `json:"port"`
}

// EndpointSliceList is a page of EndpointSlices.
type EndpointSliceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []EndpointSlice `json:"items"`
}

// DeepCopyObject implements runtime.Object. The objects are only read, so that the copy
// may share what it refers to.
func (o *Service) DeepCopyObject() runtime.Object { c := *o; return &c }

// DeepCopyObject implements runtime.Object, as that of Service.
func (o *ServiceList) DeepCopyObject() runtime.Object { c := *o; return &c }

// DeepCopyObject implements runtime.Object, as that of Service.
func (o *EndpointSlice) DeepCopyObject() runtime.Object { c := *o; return &c }

// DeepCopyObject implements runtime.Object, as that of Service.
func (o *EndpointSliceList) DeepCopyObject() runtime.Object { c := *o; return &c }
