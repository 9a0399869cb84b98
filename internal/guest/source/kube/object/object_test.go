// SPDX-License-Identifier: Apache-2.0

package object

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/randfill"

	"github.com/fairlead/fairlead/internal/port"
)

// original is a generated type of k8s.io/api.
type original interface {
	Marshal() ([]byte, error)
	Unmarshal(b []byte) error
}

// ours is its counterpart.
type ours interface {
	Reset()
	Unmarshal(b []byte) error
}

// kinds are pairs of both.
var kinds = []struct {
	theirs func() original
	ours   func() ours
}{
	{func() original { return new(corev1.Service) }, func() ours { return new(Service) }},
	{func() original { return new(corev1.ServiceList) }, func() ours { return new(ServiceList) }},
	{func() original { return new(discoveryv1.EndpointSlice) }, func() ours { return new(EndpointSlice) }},
	{func() original { return new(discoveryv1.EndpointSliceList) }, func() ours { return new(EndpointSliceList) }},
}

// ownAnnotations are those that Unmarshal keeps.
func ownAnnotations(all map[string]string) (own map[string]string) {
	for k, v := range all {
		if strings.HasPrefix(k, port.LabelPrefix) {
			if own == nil {
				own = make(map[string]string)
			}
			own[k] = v
		}
	}
	return own
}

// shape returns what JSON has of an object, in our fields. Of the metadata, only what
// Unmarshal sets remains.
func shape(t *testing.T, from any, to ours) any {
	t.Helper()
	b, err := json.Marshal(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, to); err != nil {
		t.Fatal(err)
	}
	meta := func(m *metav1.ObjectMeta) {
		*m = metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, ResourceVersion: m.ResourceVersion, Labels: m.Labels, Annotations: ownAnnotations(m.Annotations)}
	}
	list := func(m *metav1.ListMeta) {
		*m = metav1.ListMeta{ResourceVersion: m.ResourceVersion, Continue: m.Continue}
	}
	switch o := to.(type) {
	case *Service:
		meta(&o.ObjectMeta)
	case *EndpointSlice:
		meta(&o.ObjectMeta)
	case *ServiceList:
		list(&o.ListMeta)
		for i := range o.Items {
			meta(&o.Items[i].ObjectMeta)
		}
	case *EndpointSliceList:
		list(&o.ListMeta)
		for i := range o.Items {
			meta(&o.Items[i].ObjectMeta)
		}
	}
	// JSON again: an empty list and none are the same there.
	b, err = json.Marshal(to)
	if err != nil {
		t.Fatal(err)
	}
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	return prune(v)
}

// prune removes empty values.
func prune(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if e = prune(e); e == nil {
				delete(v, k)
			} else {
				v[k] = e
			}
		}
		if len(v) == 0 {
			return nil
		}
	case []any:
		for i, e := range v {
			v[i] = prune(e)
		}
		if len(v) == 0 {
			return nil
		}
	}
	return v
}

// filler fills each field of an object at random.
func filler(seed int64) *randfill.Filler {
	return randfill.NewWithSeed(seed).NilChance(0.3).NumElements(0, 3).Funcs(
		func(s *string, c randfill.Continue) { *s = "t" + string(rune('a'+c.Intn(26))) },
		func(*metav1.Time, randfill.Continue) {},
		func(*metav1.FieldsV1, randfill.Continue) {},
		func(*metav1.TypeMeta, randfill.Continue) {},
	)
}

func TestDecodesWhatTheAPIEncodes(t *testing.T) {
	for _, kind := range kinds {
		for seed := range int64(300) {
			theirs := kind.theirs()
			filler(seed).Fill(theirs)
			b, err := theirs.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			// What their own decoder reads: a list loses the difference between empty and none.
			again := kind.theirs()
			if err := again.Unmarshal(b); err != nil {
				t.Fatal(err)
			}
			got := kind.ours()
			if err := got.Unmarshal(b); err != nil {
				t.Fatalf("%T, seed %d: %v", theirs, seed, err)
			}
			want := shape(t, again, kind.ours())
			if have := shape(t, got, kind.ours()); !reflect.DeepEqual(have, want) {
				t.Fatalf("%T, seed %d:\n got %v\nwant %v", theirs, seed, have, want)
			}
			got.Reset()
			if !reflect.ValueOf(got).Elem().IsZero() {
				t.Fatalf("%T: Reset leaves %v", got, got)
			}
		}
	}
}

// Bytes of a broken server are an error at most.
func TestDecodesNonsense(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, kind := range kinds {
		refused := 0
		for seed := range int64(300) {
			theirs := kind.theirs()
			filler(seed).Fill(theirs)
			b, err := theirs.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				broken := append([]byte(nil), b...)
				for range 1 + r.IntN(3) {
					if len(broken) > 0 {
						broken[r.IntN(len(broken))] = byte(r.Uint32())
					}
				}
				broken = broken[:r.IntN(len(broken)+1)]
				if kind.ours().Unmarshal(broken) != nil {
					refused++
				}
			}
		}
		if refused < 500 {
			t.Errorf("%T refused only %d of 3,000", kind.ours(), refused)
		}
	}
}

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
