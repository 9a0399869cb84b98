// SPDX-License-Identifier: Apache-2.0

package object

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What the generated types of k8s.io/api read and write again, ours must read as well. Of
// other encodings ours refuse more, as a field with the number 0.
func FuzzProtobuf(f *testing.F) {
	meta := metav1.ObjectMeta{Namespace: "default", Name: "web", Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"fairlead.expose": "no", "other": "x"}}
	http := "http"
	service := corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.9", Ports: []corev1.ServicePort{{Name: http, Port: 80, NodePort: 30080}},
	}}
	slice := discoveryv1.EndpointSlice{ObjectMeta: meta, Ports: []discoveryv1.EndpointPort{{Name: &http}}, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.42.0.5"}}}}
	for i, o := range []original{
		&service, &corev1.ServiceList{Items: []corev1.Service{service}}, &slice, &discoveryv1.EndpointSliceList{Items: []discoveryv1.EndpointSlice{slice}},
	} {
		b, err := o.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), b)
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		k := kinds[int(kind)%len(kinds)]
		_ = k.ours().Unmarshal(b)
		theirs := k.theirs()
		if theirs.Unmarshal(b) != nil {
			return
		}
		again, err := theirs.Marshal()
		if err != nil {
			return
		}
		if err := k.ours().Unmarshal(again); err != nil {
			t.Errorf("%T: %v", k.ours(), err)
		}
	})
}
